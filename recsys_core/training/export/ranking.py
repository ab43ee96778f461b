"""Rankings of the items for the held-out users, computed while the vectors are in the memory of the ranks.

Each rank computes the rankings for the users that it has encoded, and all item vectors travel to all ranks in blocks. A rank
holds its own query vectors and item vectors, one block, and the top lists. If the positions of the targets are needed, the
blocks travel twice: first for the scores of the targets, then for the number of items above them.

A *candidate* is an item that is ranked. Its vector is a column of the score matrix.

Shapes: B queries, C candidates, D width of a vector, I items, K length of the top list, T (query, target) pairs, U users with
targets, W ranks, R rows of a rank, L seen items or targets of all queries.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from recsys_core.dataset.events import EvaluationSplit
from recsys_core.dataset.jagged import Int64Array, JaggedArray
from recsys_core.evaluation.baselines import cold_rows
from recsys_core.evaluation.held_out import queries_of, queries_with_cold_targets, sampled_users
from recsys_core.evaluation.model_rankings import ranking_file
from recsys_core.evaluation.ranking.catalogue import rank_in_chunks, worker_threads
from recsys_core.evaluation.ranking.chunks import CpuChunk, GpuChunk, Grid, Result
from recsys_core.evaluation.ranking.queries import Queries, tie_order
from recsys_core.launching.rank import Process
from recsys_core.manifests import RankingSettings
from recsys_core.training.export.encoding import Encoder, RankWriter
from recsys_core.training.export.item_columns import EncodedRows, TravellingColumns, gather_counts


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


def rank_on_ranks(
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
    grid, row_C = Grid.of(len(candidate_rows), k=k, top_only=top_only), tie_order(len(candidate_rows))
    columns = TravellingColumns(items, item_row_C=candidate_rows[row_C], block_columns=grid.block_columns, process=process)
    query_count_W, chunk_queries = gather_counts(len(queries.targets), process=process), grid.chunk_queries(on_gpu=on_gpu)
    padded_queries, query_range = _pad_to_whole_chunks(
        queries, query_count_W=query_count_W, rank=process.rank, chunk_queries=chunk_queries
    )
    with nullcontext() if on_gpu else worker_threads(min(grid.num_held_columns, grid.block_columns)) as pool:
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

        ranking = rank_in_chunks(padded_queries, rank_chunks, row_C=row_C, k=grid.k, chunk_queries=chunk_queries)
    target_count_W = gather_counts(len(ranking.position_T), process=process)
    return PartOfRanking(ranking.top_BK[query_range], ranking.position_T, query_count_W, target_count_W)


def _pad_to_whole_chunks(
    queries: Queries, *, query_count_W: Int64Array, rank: int, chunk_queries: int
) -> tuple[Queries, slice]:
    """Return the queries padded to whole chunks, and the range of this rank's queries among them.

    The queries of all ranks together are divided into chunks, so the first and the last chunk of this rank can also contain
    queries of other ranks. Copies of this rank's first query replace those. Each query then has the same place in a matrix
    product of the same shape for any number of ranks.
    """
    num_queries, first_query = int(query_count_W[rank]), int(query_count_W[:rank].sum())
    if num_queries == 0:
        return queries, slice(0, 0)
    query_end = first_query + num_queries
    num_padding_before = first_query % chunk_queries
    num_padding_after = min(int(query_count_W.sum()), -(-query_end // chunk_queries) * chunk_queries) - query_end
    query_index_B = np.pad(np.arange(num_queries), (num_padding_before, num_padding_after))
    padded_queries = Queries(
        query_BD=queries.query_BD[torch.from_numpy(query_index_B)],
        is_known_B=queries.is_known_B[query_index_B],
        seen=_pad(queries.seen, num_padding_before, num_padding_after),
        targets=_pad(queries.targets, num_padding_before, num_padding_after),
    )
    return padded_queries, slice(num_padding_before, num_padding_before + num_queries)


def _pad(lists: JaggedArray, num_padding_before: int, num_padding_after: int) -> JaggedArray:
    """Return the lists with the given numbers of empty lists before and after them."""
    return JaggedArray(np.pad(lists.offset, (num_padding_before, num_padding_after), mode="edge"), lists.values_L)


def write_rankings(
    encoder: Encoder,
    *,
    items: EncodedRows,
    query_vectors: EncodedRows,
    split: EvaluationSplit,
    settings: RankingSettings,
    folder: Path,
    writer: RankWriter,
) -> None:
    """Collective. Write the ranking files of a split, see ExportManifest.

    items, query_vectors: vectors that this rank has encoded. All ranks together have a query vector for each user with targets
    in the split.
    """
    store, process, num_items = encoder.store, encoder.process, encoder.spec.num_items
    user_row_U = store.users_with_targets(split)
    evaluated_index_U = sampled_users(len(user_row_U), max_users=settings.max_users)
    user_index_B = evaluated_index_U[
        (evaluated_index_U >= query_vectors.rows.start) & (evaluated_index_U < query_vectors.rows.stop)
    ]
    own_queries, _ = queries_of(
        user_row_U[user_index_B],
        query_vectors.vector_RD[torch.from_numpy(user_index_B - query_vectors.rows.start)],
        split=split,
        exclude_seen=settings.exclude_seen,
        store=store,
        spec=encoder.spec,
    )
    rank_candidates = partial(rank_on_ranks, items=items, process=process, on_chunk_ranked=writer.touch_heartbeat)
    ranking = rank_candidates(
        own_queries.known(), candidate_rows=np.arange(num_items), k=settings.k, top_only=settings.top_only
    )
    cold_row_C = cold_rows(store, split)
    known_queries = queries_with_cold_targets(own_queries, cold_row_C, num_items=num_items).known()
    cold_ranking = rank_candidates(known_queries, candidate_rows=cold_row_C, k=0, top_only=False)
    for content, own_array, count_W, dtype in (
        ("top", ranking.top_BK, ranking.query_count_W, np.int32),
        ("positions", ranking.position_T, ranking.target_count_W, np.int64),
        ("cold_positions", cold_ranking.position_T, cold_ranking.target_count_W, np.int64),
    ):
        path, first_row = folder / ranking_file(split, content), int(count_W[: process.rank].sum())
        with writer.part(path) as part:
            part.add(first_row, 0, torch.from_numpy(own_array if own_array.ndim == 2 else own_array[:, None]))
        writer.build(path, shape=(int(count_W.sum()), *own_array.shape[1:]), dtype=dtype)
