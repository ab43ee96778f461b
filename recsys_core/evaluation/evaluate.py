"""Stage `evaluate`: exact metrics of the model and its baselines over the full catalogue, from exported vectors.

Shapes: B queries, I items, C cold items, D width, T (query, target) pairs, U users with a target.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recsys_core.dataset.events import EvaluationSplit, EventStore
from recsys_core.dataset.jagged import JaggedArray
from recsys_core.dataset.popularity import popularity_before
from recsys_core.errors import InputError, StageError
from recsys_core.evaluation import metrics
from recsys_core.evaluation.baselines import zero_shot_vectors
from recsys_core.evaluation.cold import cold_rows, rank_among
from recsys_core.evaluation.config import EvaluationConfig
from recsys_core.evaluation.ranking import Ranking, rank_by_order, rank_served
from recsys_core.manifests import (
    Dataset,
    EvaluationManifest,
    ExportManifest,
    InteractionsManifest,
    StageFolder,
    fingerprint_of,
)
from recsys_core.models.spec import ModelSpec
from recsys_core.seeds import EVALUATION_USERS_SEED


@dataclass(frozen=True)
class EvalQueries:
    """The users with targets in one split.

    Attributes:
        query_BD: query vectors.
        history, targets: item rows before the split and in the split.
        is_new_B: users without a training event.
        is_known_B: users who are served by their query vector. The other users are served by popularity.
        popularity_order_I: item rows by falling popularity before the split.
        cold_row_C: rows of the items without an event before the split.
    """

    query_BD: Tensor
    history: JaggedArray
    targets: JaggedArray
    is_new_B: NDArray[np.bool_]
    is_known_B: NDArray[np.bool_]
    popularity_order_I: NDArray[np.int32]
    cold_row_C: NDArray[np.int64]


@dataclass
class _Progress:
    """Counter of the queries for which the stage has ranked the catalogue."""

    num_queries: int
    """Number of queries of the whole stage."""
    on_progress: Callable[[int, int], None]
    num_ranked: int = 0

    def add(self, num_queries: int) -> None:
        self.num_ranked += num_queries
        self.on_progress(self.num_ranked, self.num_queries)


def evaluate(
    config: EvaluationConfig,
    *,
    export: ExportManifest,
    dataset: Dataset,
    folder: Path,
    on_progress: Callable[[int, int], None] = lambda num_ranked, num_queries: None,
) -> EvaluationManifest:
    """Compute the metrics of the model on the validation and test splits, and the metrics of the baselines on the test split.

    Like the Retriever, the stage ranks items by the user's query vector, or by popularity if the model does not know the user.

    Metric names are flat: test/recall@20, validation/ndcg@10, baseline/popularity/recall@20, test/slice/cold_items/recall@20,
    test/users.

    An item without an event before the split is cold. Metrics under <split>/cold/ and baseline/zero_shot/cold/ come from a
    ranking of the cold items only. They are averaged over the users with a cold target, and left out if there is no such user.
    A cut-off K is used only if there are more than K cold items.

    on_progress: called with the number of queries ranked so far and their total.

    Raises:
        InputError: no test user has a target.
        StageError: the export and the interactions have different numbers of items, or a vector is not finite.
    """
    interactions, item_embeddings = dataset.interactions, dataset.item_embeddings
    if export.num_items != interactions.num_items:
        raise StageError(
            f"{export.folder} has {export.num_items} items, but {interactions.folder} has {interactions.num_items};"
            " export again"
        )

    fingerprint = fingerprint_of("evaluate", config, export, interactions, dataset.embeddings)
    stage = StageFolder(folder, EvaluationManifest, fingerprint=fingerprint)
    if stage.manifest is not None:
        return stage.manifest
    if not export.num_queries.get("test", 0):
        raise InputError("the test split has no event, so nothing can be evaluated; change interactions.split")
    with stage.writing() as output_folder:
        item_vector_ID = torch.from_numpy(np.load(export.path("item_vectors.npy")))
        store = EventStore.open(interactions)
        load_queries = partial(_load_queries, config=config, store=store, export=export, interactions=interactions)
        progress = _Progress(_num_rankings(config, export=export, has_zero_shot=item_embeddings is not None), on_progress)
        metric_values: dict[str, float] = {}
        if export.num_queries.get("validation", 0):
            metric_values |= _validation_metrics(load_queries("validation"), item_vector_ID, config=config, progress=progress)
        test_queries = load_queries("test")
        metric_values |= _test_metrics(test_queries, item_vector_ID, store=store, config=config, progress=progress)
        # Popularity cannot rank items without an event, so it has no cold metrics.
        popularity_ranking = _rank_by_popularity(test_queries, config=config)
        metric_values |= all_metrics("baseline/popularity", popularity_ranking, config=config)
        if item_embeddings is not None:
            vectors_RD = np.load(item_embeddings.vectors_path("item"), mmap_mode="r")
            vector_row_I = store.vector_rows("item")
            assert vector_row_I is not None  # the ingest requires that items have vectors
            metric_values |= _zero_shot_metrics(
                test_queries, vectors_RD, vector_row_I=vector_row_I, config=config, progress=progress
            )
        np.save(output_folder / "popularity.npy", test_queries.popularity_order_I)
        (output_folder / "metrics.json").write_text(json.dumps(metric_values, indent=2))
        return stage.commit(metrics=metric_values)


def _num_rankings(config: EvaluationConfig, *, export: ExportManifest, has_zero_shot: bool) -> int:
    """Return for how many queries the catalogue is ranked, without the popularity baseline, which is fast."""
    num_rankings_by_split = {"validation": 1, "test": 2 if has_zero_shot else 1}
    return sum(
        min(count, config.max_users or count) * num_rankings_by_split[split] for split, count in export.num_queries.items()
    )


def _validation_metrics(
    queries: EvalQueries, item_vector_ID: Tensor, *, config: EvaluationConfig, progress: _Progress
) -> dict[str, float]:
    ranking = _rank(queries, item_vector_ID, config=config, progress=progress)
    metric_values = all_metrics("validation", ranking, config=config) if len(ranking.position_T) else {}
    return metric_values | _cold_metrics("validation", queries, item_vector_ID, config=config)


def _test_metrics(
    queries: EvalQueries, item_vector_ID: Tensor, *, store: EventStore, config: EvaluationConfig, progress: _Progress
) -> dict[str, float]:
    ranking = _rank(queries, item_vector_ID, config=config, progress=progress)
    if not len(ranking.position_T):
        raise InputError(
            f"the users had already seen all {ranking.num_seen_targets} test targets; set evaluation.exclude_seen to false"
        )
    metric_values = all_metrics("test", ranking, config=config)
    metric_values |= _slice_metrics("test", ranking, store=store, queries=queries, config=config)
    return metric_values | _cold_metrics("test", queries, item_vector_ID, config=config)


def _zero_shot_metrics(
    queries: EvalQueries,
    vectors_RD: NDArray[np.float32],
    *,
    vector_row_I: NDArray[np.int64],
    config: EvaluationConfig,
    progress: _Progress,
) -> dict[str, float]:
    """Return the metrics of the mean pretrained vector of a history as the query. Every user has such a query."""
    query_BD, item_vector_ID = zero_shot_vectors(vectors_RD, vector_row_I=vector_row_I, histories=queries.history)
    zero_shot_queries = replace(queries, query_BD=query_BD, is_known_B=np.ones_like(queries.is_known_B))
    ranking = _rank(zero_shot_queries, item_vector_ID, config=config, progress=progress)
    metric_values = all_metrics("baseline/zero_shot", ranking, config=config)
    return metric_values | _cold_metrics("baseline/zero_shot", zero_shot_queries, item_vector_ID, config=config)


def _load_queries(
    split: EvaluationSplit,
    *,
    config: EvaluationConfig,
    store: EventStore,
    export: ExportManifest,
    interactions: InteractionsManifest,
) -> EvalQueries:
    """Load the exported queries of a split; if there are more than max_users, a random sample of them with a fixed seed."""
    user_row_B = np.load(export.path(f"query_users_{split}.npy"))
    query_vectors = np.load(export.path(f"query_vectors_{split}.npy"), mmap_mode="r")
    sampled_indices = np.arange(len(user_row_B))
    if config.max_users is not None and config.max_users < len(user_row_B):
        sampled_indices = np.sort(
            np.random.default_rng(EVALUATION_USERS_SEED).choice(len(user_row_B), config.max_users, replace=False)
        )
    user_row_B = user_row_B[sampled_indices]
    history = store.items_before(user_row_B, split)
    spec = ModelSpec.model_validate_json(export.path("model.json").read_bytes())
    return EvalQueries(
        query_BD=torch.from_numpy(query_vectors[sampled_indices]),
        history=history,
        targets=store.targets(user_row_B, split),
        is_new_B=store.train_count_U[user_row_B] == 0,
        is_known_B=spec.is_known(history_length_B=history.lengths, user_row_B=user_row_B),
        popularity_order_I=popularity_before(split, store=store, interactions=interactions),
        cold_row_C=cold_rows(store, split),
    )


def _rank(queries: EvalQueries, item_vector_ID: Tensor, *, config: EvaluationConfig, progress: _Progress) -> Ranking:
    return rank_served(
        queries.query_BD,
        is_known_B=queries.is_known_B,
        item_vector_ID=item_vector_ID,
        order_I=queries.popularity_order_I,
        seen=_seen_items(queries, config=config),
        targets=queries.targets,
        k=max(config.ks),
        on_progress=progress.add,
    )


def _rank_by_popularity(queries: EvalQueries, *, config: EvaluationConfig) -> Ranking:
    seen = _seen_items(queries, config=config)
    return rank_by_order(queries.popularity_order_I, seen=seen, targets=queries.targets, k=max(config.ks))


def _seen_items(queries: EvalQueries, *, config: EvaluationConfig) -> JaggedArray:
    return queries.history if config.exclude_seen else JaggedArray.empty(len(queries.history))


def all_metrics(prefix: str, ranking: Ranking, *, config: EvaluationConfig) -> dict[str, float]:
    """Return all metrics of a ranking under <prefix>/<metric>. Undefined metrics are left out."""
    target_positions = ranking.target_positions()
    metric_values: dict[str, float] = {
        "users": target_positions.num_users,
        "targets": len(target_positions.position_T),
        "seen_targets": ranking.num_seen_targets,
    }
    for k in config.ks:
        metric_values[f"recall@{k}"] = _mean(metrics.recall(target_positions, k=k))
        metric_values[f"ndcg@{k}"] = _mean(metrics.ndcg(target_positions, k=k))
        metric_values[f"precision@{k}"] = _mean(metrics.precision(target_positions, k=k))
        metric_values[f"hit_rate@{k}"] = _mean(metrics.hit_rate(target_positions, k=k))
        metric_values[f"coverage@{k}"] = metrics.coverage(ranking.top_BK, k=k, num_items=ranking.num_items)
    metric_values["mrr"] = _mean(metrics.reciprocal_rank(target_positions))
    metric_values[f"map@{max(config.ks)}"] = _mean(metrics.average_precision(target_positions, k=max(config.ks)))
    metric_values["auc"] = _mean(metrics.auc(target_positions))
    return {f"{prefix}/{metric_name}": float(value) for metric_name, value in metric_values.items() if not math.isnan(value)}


def _cold_metrics(prefix: str, queries: EvalQueries, item_vector_ID: Tensor, *, config: EvaluationConfig) -> dict[str, float]:
    """Return the metrics of cold items ranked among cold items; empty if no user has a cold target."""
    ranking = rank_among(
        queries.query_BD,
        is_known_B=queries.is_known_B,
        item_vector_ID=item_vector_ID,
        order_I=queries.popularity_order_I,
        candidate_rows=queries.cold_row_C,
        seen=JaggedArray.empty(len(queries.history)),  # a cold item is in no history
        targets=queries.targets,
        k=0,
    )
    if not len(ranking.position_T):
        return {}
    target_positions = ranking.target_positions()
    metric_values: dict[str, float] = {"users": target_positions.num_users, "items": ranking.num_items}
    for k in config.ks:
        if k < ranking.num_items:  # otherwise every item is among the first k
            metric_values[f"recall@{k}"] = _mean(metrics.recall(target_positions, k=k))
            metric_values[f"ndcg@{k}"] = _mean(metrics.ndcg(target_positions, k=k))
            metric_values[f"hit_rate@{k}"] = _mean(metrics.hit_rate(target_positions, k=k))
    return {f"{prefix}/cold/{metric_name}": float(value) for metric_name, value in metric_values.items()}


def _slice_metrics(
    prefix: str, ranking: Ranking, *, store: EventStore, queries: EvalQueries, config: EvaluationConfig
) -> dict[str, float]:
    """Return metrics over subsets of the targets, from the positions of the targets in the full ranking."""
    is_cold_T, is_new_T = store.train_count_I[ranking.item_T] == 0, queries.is_new_B[ranking.query_T]
    mask_by_slice = {"cold_items": is_cold_T, "warm_items": ~is_cold_T, "new_users": is_new_T, "known_users": ~is_new_T}
    metric_values: dict[str, float] = {}
    for slice_name, mask_T in mask_by_slice.items():
        metric_values[f"{prefix}/slice/{slice_name}/targets"] = float(mask_T.sum())
        if not mask_T.any():
            continue
        target_positions = ranking.target_positions(mask_T)
        for k in config.ks:
            metric_values[f"{prefix}/slice/{slice_name}/recall@{k}"] = _mean(metrics.recall(target_positions, k=k))
            metric_values[f"{prefix}/slice/{slice_name}/ndcg@{k}"] = _mean(metrics.ndcg(target_positions, k=k))
    return metric_values


def _mean(value_U: NDArray[np.float64]) -> float:
    """Average over the users for whom the metric is not NaN."""
    defined_value_U = value_U[~np.isnan(value_U)]
    return float(defined_value_U.mean()) if len(defined_value_U) else math.nan
