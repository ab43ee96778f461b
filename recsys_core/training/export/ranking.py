"""Rankings for the held-out users by the model and by pretrained vectors (zero-shot), which all ranks compute together.

Each rank computes the rankings for its share of the users, and all item vectors travel to all ranks in blocks. A rank
holds its own query vectors and item vectors, one block, and the top lists. If the positions of the targets are needed, the
blocks travel twice: first for the scores of the targets, then for the number of items above them.

A *candidate* is an item that is ranked. Its vector is a column of the score matrix.

Shapes: B queries, C candidates, D width of a vector, I items, N items of a block, K length of the top list, T (query, target)
pairs, U users with targets, W ranks, R rows of a rank or pretrained vectors, L seen items or targets of all queries.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recsys_core.dataset.events import EvaluationSplit
from recsys_core.dataset.jagged import Int64Array, JaggedArray, chunk_slices
from recsys_core.evaluation.baselines import ZeroShot, cold_rows
from recsys_core.evaluation.held_out import queries_of, queries_with_cold_targets, sampled_users
from recsys_core.evaluation.model_rankings import Ranker, ranking_file
from recsys_core.evaluation.ranking.catalogue import rank_in_chunks, worker_threads
from recsys_core.evaluation.ranking.chunks import CpuChunk, GpuChunk, Grid, Result
from recsys_core.evaluation.ranking.queries import Queries, tie_order
from recsys_core.launching.rank import Process
from recsys_core.manifests import RankingSettings
from recsys_core.training.export.encoding import Encoder, RankWriter
from recsys_core.training.export.item_columns import EncodedRows, TravellingColumns, gather_counts, rows_of_rank

ZERO_SHOT_BLOCK_ITEMS = 8_192
"""Number of items whose pretrained vectors are normalised at once."""


@dataclass(frozen=True)
class PartOfRanking:
    """The ranking of this rank's queries.

    Attributes:
        top_BK: int32, rows of the best items; -1 after the last candidate.
        position_T: int64, position of each target, see `Ranking`.
        query_count_W: number of queries of each rank, in the order of the ranks.
        target_count_W: number of targets of each rank.
    """

    top_BK: NDArray[np.int32]
    position_T: NDArray[np.int64]
    query_count_W: Int64Array
    target_count_W: Int64Array


def rank_collectively(
    queries: Queries,
    *,
    items: EncodedRows,
    candidate_rows: Int64Array,
    k: int,
    top_only: bool,
    process: Process,
    on_chunk_ranked: Callable[[], None] = lambda: None,
) -> PartOfRanking:
    """Collective. Rank the candidates for this rank's queries.

    The rankings of all ranks together are equal, bit for bit, to the result of `rank_catalogue` for all queries.

    Args:
        queries: queries of this rank. Items are numbered by their index in `candidate_rows`.
        items: item vectors that this rank has encoded.
        candidate_rows: item rows that are ranked.
        k, top_only: see `rank_catalogue`.
        on_chunk_ranked: called after each chunk of queries in each block of items.
    """
    on_gpu = process.device.type == "cuda"
    grid, candidate_index_C = Grid.of(len(candidate_rows), k=k, top_only=top_only), tie_order(len(candidate_rows))
    item_row_C = candidate_rows[candidate_index_C]
    columns = TravellingColumns(items, item_row_C=item_row_C, columns_per_block=grid.columns_per_block, process=process)
    query_count_W = gather_counts(len(queries.targets), process=process)
    queries_per_chunk = grid.queries_per_chunk(on_gpu=on_gpu)
    padded_queries, query_range = _pad_to_whole_chunks(
        queries, query_count_W=query_count_W, rank=process.rank, queries_per_chunk=queries_per_chunk
    )
    with nullcontext() if on_gpu else worker_threads(min(grid.num_held_columns, grid.columns_per_block)) as pool:
        map_chunks = map if pool is None else pool.map

        def rank_chunks(
            chunks: Sequence[slice], seen_by_chunk: Sequence[JaggedArray], targets_by_chunk: Sequence[JaggedArray]
        ) -> Iterable[Result]:
            chunk_class: type[CpuChunk | GpuChunk] = GpuChunk if on_gpu else CpuChunk
            ranked_chunks = [
                chunk_class(grid, padded_queries.query_BD[chunk], seen=seen, targets=targets)
                for chunk, seen, targets in zip(chunks, seen_by_chunk, targets_by_chunk, strict=True)
            ]
            for chunk_method in (chunk_class.add,) if top_only else (chunk_class.find_target_scores, chunk_class.add):
                for first_column, block_CD in columns.travel():
                    process_block = partial(chunk_method, first_column=first_column, block_CD=block_CD)
                    for _ in map_chunks(process_block, ranked_chunks):
                        on_chunk_ranked()
            return [ranked_chunk.result() for ranked_chunk in ranked_chunks]

        ranking = rank_in_chunks(
            padded_queries, rank_chunks, row_C=candidate_index_C, k=grid.k, queries_per_chunk=queries_per_chunk
        )
    target_count_W = gather_counts(len(ranking.position_T), process=process)
    return PartOfRanking(ranking.top_BK[query_range], ranking.position_T, query_count_W, target_count_W)


def _pad_to_whole_chunks(
    queries: Queries, *, query_count_W: Int64Array, rank: int, queries_per_chunk: int
) -> tuple[Queries, slice]:
    """Return the queries padded to whole chunks, and the range of this rank's queries among them.

    The queries of all ranks together are divided into chunks, so the first and the last chunk of this rank can also contain
    queries of other ranks. Copies of this rank's first query replace these queries. With any number of ranks, each query then
    has the same place in a matrix product of the same shape.
    """
    num_queries, first_query = int(query_count_W[rank]), int(query_count_W[:rank].sum())
    if num_queries == 0:
        return queries, slice(0, 0)
    query_end = first_query + num_queries
    num_padding_before = first_query % queries_per_chunk
    num_padding_after = min(int(query_count_W.sum()), -(-query_end // queries_per_chunk) * queries_per_chunk) - query_end
    query_index_B = np.pad(np.arange(num_queries), (num_padding_before, num_padding_after))
    padded_queries = Queries(
        query_BD=queries.query_BD[torch.from_numpy(query_index_B)],
        is_known_B=queries.is_known_B[query_index_B],
        seen=_pad_with_empty_lists(queries.seen, num_padding_before, num_padding_after),
        targets=_pad_with_empty_lists(queries.targets, num_padding_before, num_padding_after),
    )
    return padded_queries, slice(num_padding_before, num_padding_before + num_queries)


def _pad_with_empty_lists(lists: JaggedArray, num_padding_before: int, num_padding_after: int) -> JaggedArray:
    """Return the lists with empty lists added before and after them."""
    return JaggedArray(np.pad(lists.offset, (num_padding_before, num_padding_after), mode="edge"), lists.values_L)


class RankingWriter:
    """Writer of the rankings. All ranks together write each file.

    Attributes:
        settings: see ExportManifest.
        folder: folder of the export.
    """

    def __init__(self, encoder: Encoder, *, settings: RankingSettings, folder: Path, writer: RankWriter) -> None:
        self.settings, self.folder = settings, folder
        self._encoder, self._writer = encoder, writer

    def write_model_rankings(self, split: EvaluationSplit, *, items: EncodedRows, query_vectors: EncodedRows) -> None:
        """Collective. Write the model's rankings for a split.

        items, query_vectors: vectors that this rank has encoded. All ranks together have a query vector for each user with
        targets in the split.
        """
        queries, _ = self._own_queries(split, vector_RD=query_vectors.vector_RD)
        self._write_rankings(queries, split, items=items, ranker="model")

    def write_zero_shot_rankings(self, vectors_RD: NDArray[np.float32]) -> None:
        """Collective. Write the zero-shot rankings for the test split. Each rank reads its share of the pretrained vectors."""
        store, process = self._encoder.store, self._encoder.process
        zero_shot = ZeroShot.of(store, vectors_RD)
        items = EncodedRows(store.num_items, dim=zero_shot.dim, process=process)
        first_row = items.rows.start
        for block in chunk_slices(items.rows.stop - first_row, length=ZERO_SHOT_BLOCK_ITEMS):
            item_ND = zero_shot.item_vectors(slice(first_row + block.start, first_row + block.stop))
            items.add(first_row + block.start, 0, item_ND)
            self._writer.touch_heartbeat()
        queries, history = self._own_queries("test", vector_RD=None)
        queries = replace(queries.as_known(), query_BD=zero_shot.query_vectors(history).to(process.device))
        self._write_rankings(queries, "test", items=items, ranker="zero_shot")

    def _own_queries(self, split: EvaluationSplit, *, vector_RD: Tensor | None) -> tuple[Queries, JaggedArray]:
        """Return the evaluated queries of this rank's users, and their histories. vector_RD: query vectors of these users."""
        store = self._encoder.store
        user_row_U = store.users_with_targets(split)
        own_range = rows_of_rank(len(user_row_U), self._encoder.process)
        sampled_index_U = sampled_users(len(user_row_U), max_users=self.settings.max_users)
        own_index_B = sampled_index_U[(sampled_index_U >= own_range.start) & (sampled_index_U < own_range.stop)]
        query_BD = (
            torch.empty((len(own_index_B), 0))
            if vector_RD is None
            else vector_RD[torch.from_numpy(own_index_B - own_range.start)]
        )
        return queries_of(
            user_row_U[own_index_B],
            query_BD,
            split=split,
            exclude_seen=self.settings.exclude_seen,
            store=store,
            spec=self._encoder.spec,
        )

    def _write_rankings(self, queries: Queries, split: EvaluationSplit, *, items: EncodedRows, ranker: Ranker) -> None:
        """Collective. Rank all items and the cold items for this rank's queries, and write the files, see ExportManifest."""
        process, settings, num_items = self._encoder.process, self.settings, self._encoder.spec.num_items
        rank_candidates = partial(rank_collectively, items=items, process=process, on_chunk_ranked=self._writer.touch_heartbeat)
        ranking = rank_candidates(
            queries.known(), candidate_rows=np.arange(num_items), k=settings.k, top_only=settings.top_only
        )
        cold_row_C = cold_rows(self._encoder.store, split)
        cold_queries = queries_with_cold_targets(queries, cold_row_C, num_items=num_items).known()
        cold_ranking = rank_candidates(cold_queries, candidate_rows=cold_row_C, k=0, top_only=False)
        for content, own_array, count_W, dtype in (
            ("top", ranking.top_BK, ranking.query_count_W, np.int32),
            ("positions", ranking.position_T, ranking.target_count_W, np.int64),
            ("cold_positions", cold_ranking.position_T, cold_ranking.target_count_W, np.int64),
        ):
            path = self.folder / ranking_file(split, content, ranker=ranker)
            with self._writer.part(path) as part:
                own_rows = torch.from_numpy(own_array if own_array.ndim == 2 else own_array[:, None])
                part.add(int(count_W[: process.rank].sum()), 0, own_rows)
            self._writer.build(path, shape=(int(count_W.sum()), *own_array.shape[1:]), dtype=dtype)
