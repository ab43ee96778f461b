"""Stage `evaluate`: exact metrics of the model and its baselines over the full catalogue, from exported vectors.

Shapes: B queries, I items, C cold items, D width, T (query, target) pairs, U users with a target.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recsys_core.dataset.events import EvaluationSplit, EventStore
from recsys_core.dataset.jagged import JaggedArray
from recsys_core.errors import InputError, StageError
from recsys_core.evaluation import diversity, metrics
from recsys_core.evaluation.baselines import cold_rows, popularity_before, zero_shot_vectors
from recsys_core.evaluation.config import EvaluationConfig
from recsys_core.evaluation.metrics import Floats, TargetPositions
from recsys_core.evaluation.ranking import Queries, Ranking, rank_among, rank_by_order, rank_served
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
class _Split:
    """The users with targets in one split, and the items.

    Attributes:
        user_row_B: rows of the users, ascending.
        history: item rows before the split.
        is_new_B: users without a training event.
        popularity_order_I: item rows by falling popularity before the split.
        cold_row_C: rows of the items without an event before the split.
    """

    queries: Queries
    user_row_B: NDArray[np.int64]
    history: JaggedArray
    is_new_B: NDArray[np.bool_]
    popularity_order_I: NDArray[np.int32]
    cold_row_C: NDArray[np.int64]


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
        item_vector_ID, store = torch.from_numpy(np.load(export.path("item_vectors.npy"))), EventStore.open(interactions)
        load_split = partial(_load_split, config=config, store=store, export=export, interactions=interactions)
        on_ranked = _counter(on_progress, total=_num_rankings(config, export=export, has_zero_shot=item_embeddings is not None))
        measure = partial(_measure, config=config, on_ranked=on_ranked)
        metric_values: dict[str, float] = {}
        if export.num_queries.get("validation", 0):
            metric_values |= measure("validation", load_split("validation"), item_vector_ID)[0]
        test_split = load_split("test")
        test_metrics, ranking = measure("test", test_split, item_vector_ID)
        if not len(ranking.position_T):
            raise InputError(
                f"the users had already seen all {ranking.num_seen_targets} test targets; set evaluation.exclude_seen to false"
            )
        is_cold_T, is_new_T = store.train_count_I[ranking.item_T] == 0, test_split.is_new_B[ranking.query_T]
        metric_values |= test_metrics | _slice_metrics(
            ranking,
            {"cold_items": is_cold_T, "warm_items": ~is_cold_T, "new_users": is_new_T, "known_users": ~is_new_T},
            config=config,
        )
        # Popularity cannot rank items without an event, so it has no cold metrics.
        popularity_ranking = rank_by_order(test_split.queries, order_I=test_split.popularity_order_I, k=max(config.ks))
        metric_values |= all_metrics("baseline/popularity", popularity_ranking, config=config)
        rankings = {"test": ranking, "baseline/popularity": popularity_ranking}
        vectors_RD = None
        if item_embeddings is not None:
            vectors_RD = np.load(item_embeddings.vectors_path("item"), mmap_mode="r")
            vector_row_I = store.vector_rows("item")
            assert vector_row_I is not None  # the ingest requires that items have vectors
            query_BD, vector_ID = zero_shot_vectors(vectors_RD, vector_row_I=vector_row_I, histories=test_split.history)
            every_user = replace(test_split.queries, query_BD=query_BD, is_known_B=np.ones(len(query_BD), np.bool_))
            zero_shot_metrics, zero_shot_ranking = measure(
                "baseline/zero_shot", replace(test_split, queries=every_user), vector_ID
            )
            metric_values |= zero_shot_metrics
            rankings["baseline/zero_shot"] = zero_shot_ranking
        for prefix, ranking in rankings.items():
            metric_values |= _list_metrics(prefix, ranking, test_split, store=store, vectors_RD=vectors_RD, k=min(config.ks))
        _write_user_metrics(rankings, test_split, config=config, path=output_folder / metrics.USER_METRICS_FILE)
        np.save(output_folder / "popularity.npy", test_split.popularity_order_I)
        (output_folder / "metrics.json").write_text(json.dumps(metric_values, indent=2))
        return stage.commit(metrics=metric_values)


def _list_metrics(
    prefix: str, ranking: Ranking, split: _Split, *, store: EventStore, vectors_RD: NDArray[np.float32] | None, k: int
) -> dict[str, float]:
    """Return the metrics of the recommended items beyond accuracy, under <prefix>/<metric>@<k>; NaN is left out."""
    top_BK, train_count_I = ranking.top_BK[:, :k], store.train_count_I
    values = {
        "novelty": diversity.novelty(top_BK, train_count_I=train_count_I),
        "gini": diversity.gini(top_BK, num_items=ranking.num_items),
        "popularity_lift": diversity.popularity_lift(
            top_BK, history_item_L=split.history.values_L, train_count_I=train_count_I
        ),
    }
    vector_row_I = store.vector_rows("item")
    if vectors_RD is not None and vector_row_I is not None:
        values["diversity"] = diversity.intra_list_diversity(top_BK, vectors_RD=vectors_RD, vector_row_I=vector_row_I)
    return {f"{prefix}/{name}@{k}": value for name, value in values.items() if not math.isnan(value)}


def _write_user_metrics(rankings: dict[str, Ranking], split: _Split, *, config: EvaluationConfig, path: Path) -> None:
    """Write the metrics of each test user, by which the gate compares served versions with baselines.

    A served version never recommends items that the user has seen, so rankings with these items are left out.
    """
    if not config.exclude_seen:
        unseen = replace(split.queries, seen=split.history)
        rankings = {"baseline/popularity": rank_by_order(unseen, order_I=split.popularity_order_I, k=0)}
    user_metrics = {
        prefix.replace("test", "model").removeprefix("baseline/"): metrics.UserMetrics.of(
            ranking.target_positions(), user_row_B=split.user_row_B
        )
        for prefix, ranking in rankings.items()
    }
    metrics.write_user_metrics(user_metrics, path)


def _num_rankings(config: EvaluationConfig, *, export: ExportManifest, has_zero_shot: bool) -> int:
    """Return for how many queries the catalogue is ranked, without the popularity baseline, which is fast."""
    num_rankings_by_split = {"validation": 1, "test": 2 if has_zero_shot else 1}
    return sum(
        min(count, config.max_users or count) * num_rankings_by_split[split] for split, count in export.num_queries.items()
    )


def _counter(on_progress: Callable[[int, int], None], *, total: int) -> Callable[[int], None]:
    """Return a function that adds up the numbers that it is called with, and reports the sum and `total`."""
    num_ranked = 0

    def add(num_queries: int) -> None:
        nonlocal num_ranked
        num_ranked += num_queries
        on_progress(num_ranked, total)

    return add


def _load_split(
    split: EvaluationSplit,
    *,
    config: EvaluationConfig,
    store: EventStore,
    export: ExportManifest,
    interactions: InteractionsManifest,
) -> _Split:
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
    return _Split(
        queries=Queries(
            query_BD=torch.from_numpy(query_vectors[sampled_indices]),
            is_known_B=spec.is_known(history_length_B=history.lengths, user_row_B=user_row_B),
            seen=history if config.exclude_seen else JaggedArray.empty(len(history)),
            targets=store.targets(user_row_B, split),
        ),
        user_row_B=user_row_B,
        history=history,
        is_new_B=store.train_count_U[user_row_B] == 0,
        popularity_order_I=popularity_before(split, store=store, interactions=interactions),
        cold_row_C=cold_rows(store, split),
    )


def _measure(
    prefix: str, split: _Split, item_vector_ID: Tensor, *, config: EvaluationConfig, on_ranked: Callable[[int], None]
) -> tuple[dict[str, float], Ranking]:
    """Return the metrics of a model on the catalogue and on the cold items, and its ranking of the catalogue."""
    order_I = split.popularity_order_I
    ranking = rank_served(
        split.queries, item_vector_ID=item_vector_ID, order_I=order_I, k=max(config.ks), on_progress=on_ranked
    )
    metric_values = all_metrics(prefix, ranking, config=config) if len(ranking.position_T) else {}
    unseen = replace(split.queries, seen=JaggedArray.empty(len(split.history)))  # a cold item is in no history
    cold_ranking = rank_among(unseen, item_vector_ID=item_vector_ID, order_I=order_I, candidate_rows=split.cold_row_C, k=0)
    return metric_values | _cold_metrics(prefix, cold_ranking, config=config), ranking


def all_metrics(prefix: str, ranking: Ranking, *, config: EvaluationConfig) -> dict[str, float]:
    """Return all metrics of a ranking under <prefix>/<metric>. Undefined metrics are left out."""
    targets, max_k = ranking.target_positions(), max(config.ks)
    metric_values: dict[str, float] = {
        "users": targets.num_users,
        "targets": len(targets.position_T),
        "seen_targets": ranking.num_seen_targets,
    }
    metric_values |= _means(targets, ("recall", "ndcg", "precision", "hit_rate"), ks=config.ks)
    for k in config.ks:
        metric_values[f"coverage@{k}"] = metrics.coverage(ranking.top_BK, k=k, num_items=ranking.num_items)
    metric_values["mrr"] = _mean(metrics.reciprocal_rank(targets))
    metric_values[f"map@{max_k}"] = _mean(metrics.average_precision(targets, k=max_k))
    metric_values["auc"] = _mean(metrics.auc(targets))
    return {f"{prefix}/{metric_name}": float(value) for metric_name, value in metric_values.items() if not math.isnan(value)}


def _cold_metrics(prefix: str, ranking: Ranking, *, config: EvaluationConfig) -> dict[str, float]:
    """Return the metrics of cold items ranked among cold items; empty if no user has a cold target."""
    if not len(ranking.position_T):
        return {}
    targets = ranking.target_positions()
    cut_offs = [k for k in config.ks if k < ranking.num_items]  # with a larger cut-off, every item is among the first k
    metric_values = _means(targets, ("recall", "ndcg", "hit_rate"), ks=cut_offs)
    metric_values |= {"users": float(targets.num_users), "items": float(ranking.num_items)}
    return {f"{prefix}/cold/{metric_name}": value for metric_name, value in metric_values.items()}


def _slice_metrics(
    ranking: Ranking, mask_by_slice: dict[str, NDArray[np.bool_]], *, config: EvaluationConfig
) -> dict[str, float]:
    """Return metrics over subsets of the targets, from the positions of the targets in the full ranking."""
    metric_values: dict[str, float] = {}
    for slice_name, mask_T in mask_by_slice.items():
        slice_metrics = {"targets": float(mask_T.sum())}
        if mask_T.any():
            slice_metrics |= _means(ranking.target_positions(mask_T), ("recall", "ndcg"), ks=config.ks)
        metric_values |= {f"test/slice/{slice_name}/{metric_name}": value for metric_name, value in slice_metrics.items()}
    return metric_values


def _means(targets: TargetPositions, metric_names: Sequence[str], *, ks: Sequence[int]) -> dict[str, float]:
    """Return the mean of each metric over the users, by <metric>@<k>."""
    return {f"{name}@{k}": _mean(metrics.METRIC_BY_NAME[name](targets, k=k)) for k in ks for name in metric_names}


def _mean(value_U: Floats) -> float:
    """Average over the users for whom the metric is not NaN."""
    defined_value_U = value_U[~np.isnan(value_U)]
    return float(defined_value_U.mean()) if len(defined_value_U) else math.nan
