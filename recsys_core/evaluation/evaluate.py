"""Stage `evaluate`: exact metrics of the model and its baselines over the full catalogue, from exported vectors.

Shapes: B queries, I items, C cold items, D width, T (query, target) pairs, U users with a target.
"""

import json
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recsys_core.dataset.events import EvaluationSplit, EventStore
from recsys_core.dataset.jagged import JaggedArray, ragged_ranges
from recsys_core.errors import InputError, StageError
from recsys_core.evaluation import closed_form, diversity, metrics
from recsys_core.evaluation.baselines import cold_rows, popularity_before, recent_popularity_order, zero_shot_vectors
from recsys_core.evaluation.config import EvaluationConfig
from recsys_core.evaluation.estimates import (
    Estimate,
    Estimates,
    cold_metrics,
    full_ranking_metrics,
    half_widths,
    prefixed,
    slice_reports,
)
from recsys_core.evaluation.ranking import (
    Queries,
    Ranking,
    rank_among,
    rank_by_order,
    rank_by_scores,
    rank_served,
)
from recsys_core.evaluation.slices import feature_slices, item_slices, user_slices
from recsys_core.manifests import (
    Dataset,
    EvaluationManifest,
    ExportManifest,
    FeaturesManifest,
    InteractionsManifest,
    SliceReport,
    StageFolder,
    fingerprint_of,
)
from recsys_core.models.spec import ModelSpec
from recsys_core.seeds import EVALUATION_USERS_SEED

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Split:
    """The users with targets in one split, and the items.

    Attributes:
        user_row_B: rows of the users, ascending.
        history: item rows before the split.
        popularity_order_I: item rows by falling popularity before the split.
        cold_row_C: rows of the items without an event before the split.
    """

    queries: Queries
    user_row_B: NDArray[np.int64]
    history: JaggedArray
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

    sliced_features = dataset.features if config.slices else None
    fingerprint = fingerprint_of("evaluate", config, export, interactions, dataset.embeddings, sliced_features)
    stage = StageFolder(folder, EvaluationManifest, fingerprint=fingerprint)
    if stage.manifest is not None:
        return stage.manifest
    if not export.num_queries.get("test", 0):
        raise InputError("the test split has no event, so nothing can be evaluated; change interactions.split")
    with stage.writing() as output_folder:
        item_vector_ID, store = torch.from_numpy(np.load(export.path("item_vectors.npy"))), EventStore.open(interactions)
        load_split = partial(_load_split, config=config, store=store, export=export, interactions=interactions)
        on_ranked = _counter(on_progress, total=_num_rankings(config, export=export, dataset=dataset))
        measure = partial(_measure, config=config, on_ranked=on_ranked)
        estimates: Estimates = {}
        if export.num_queries.get("validation", 0):
            estimates |= measure("validation", load_split("validation"), item_vector_ID)[0]
        test_split = load_split("test")
        test_estimates, ranking = measure("test", test_split, item_vector_ID)
        if not len(ranking.position_T):
            raise InputError(
                f"the users had already seen all {ranking.num_seen_targets} test targets; set evaluation.exclude_seen to false"
            )
        slices = _slices(ranking, test_split, config=config, store=store, features=dataset.features)
        estimates |= test_estimates | _slice_estimates(slices)
        rankings = {"test": ranking}
        for name, baseline_ranking in _rank_baselines(config, test_split, store=store, on_ranked=on_ranked):
            rankings[f"baseline/{name}"] = baseline_ranking
            estimates |= prefixed(f"baseline/{name}", full_ranking_metrics(baseline_ranking, config=config))
        vectors_RD = None
        if item_embeddings is not None:
            vectors_RD = np.load(item_embeddings.vectors_path("item"), mmap_mode="r")
            vector_row_I = store.vector_rows("item")
            assert vector_row_I is not None  # the ingest requires that items have vectors
            query_BD, vector_ID = zero_shot_vectors(vectors_RD, vector_row_I=vector_row_I, histories=test_split.history)
            every_user = replace(test_split.queries, query_BD=query_BD, is_known_B=np.ones(len(query_BD), np.bool_))
            zero_shot_estimates, rankings["baseline/zero_shot"] = measure(
                "baseline/zero_shot", replace(test_split, queries=every_user), vector_ID
            )
            estimates |= zero_shot_estimates
        metric_values = {name: float(estimate.value) for name, estimate in estimates.items()}
        for prefix, ranking in rankings.items():
            metric_values |= _list_metrics(prefix, ranking, test_split, store=store, vectors_RD=vectors_RD, k=min(config.ks))
        _write_user_metrics(rankings, test_split, config=config, path=output_folder / metrics.USER_METRICS_FILE)
        positions = {
            prefix.replace("test", "model").removeprefix("baseline/"): r.target_positions() for prefix, r in rankings.items()
        }
        metrics.write_positions(positions, user_row_B=test_split.user_row_B, path=output_folder / metrics.POSITIONS_FILE)
        np.save(output_folder / "popularity.npy", test_split.popularity_order_I)
        (output_folder / "metrics.json").write_text(json.dumps(metric_values, indent=2))
        return stage.commit(metrics=metric_values, half_widths=half_widths(estimates), slices=slices)


def _rank_baselines(
    config: EvaluationConfig, split: _Split, *, store: EventStore, on_ranked: Callable[[int], None]
) -> Iterator[tuple[str, Ranking]]:
    """Yield the name and the ranking of each baseline that needs only the log, and therefore cannot rank cold items."""
    k, order_I = _num_listed(config), split.popularity_order_I
    rank_in_order = partial(rank_by_order, split.queries, k=k)
    yield "popularity", rank_in_order(order_I=order_I)
    if "recent_popularity" in config.baselines and store.has_times:
        recent_order_I = recent_popularity_order(
            "test", store=store, days=config.recent_days, popularity_order_I=split.popularity_order_I
        )
        yield "recent_popularity", rank_in_order(order_I=recent_order_I)
    linear_baselines = [name for name in ("cooccurrence", "closed_form") if name in config.baselines]
    if linear_baselines and store.num_items > config.closed_form.max_items:
        logger.info(
            "the baselines %s are left out: %d items are more than evaluation.closed_form.max_items, %d",
            " and ".join(linear_baselines), store.num_items, config.closed_form.max_items,
        )  # fmt: skip
        return
    for name in linear_baselines:
        # Without a history all scores are 0, and the items are ranked by popularity.
        model = closed_form.cooccurrence if name == "cooccurrence" else partial(closed_form.linear_model, config.closed_form)
        scores = model(store=store, histories=split.history, order_I=order_I)
        yield (
            name,
            rank_by_scores(
                split.queries, **scores._asdict(), row_C=order_I, k=k, top_only=_is_top_only(config), on_progress=on_ranked
            ),
        )


def _slices(
    ranking: Ranking, split: _Split, *, config: EvaluationConfig, store: EventStore, features: FeaturesManifest | None
) -> tuple[SliceReport, ...]:
    """Return the metrics of the slices by popularity, by history and by features."""
    user_row_T, train_count_U = split.user_row_B[ranking.query_T], store.train_count_U[split.user_row_B]
    masks = item_slices(store.train_count_I, item_T=ranking.item_T) | user_slices(train_count_U, user_T=ranking.query_T)
    masks |= {"warm items": ~masks["cold items"], "known users": ~masks["new users"]}
    reports = slice_reports(ranking, masks, config=config, min_users=config.min_slice_users)
    for feature_slice in config.slices:
        side = feature_slice.feature.partition(".")[0]
        owner_T = {"user": user_row_T, "item": ranking.item_T}.get(side)
        if owner_T is None:
            owner_T = _event_of_target(ranking, split, store=store)
        reports += slice_reports(
            ranking,
            feature_slices(feature_slice, features, owner_T=owner_T),
            config=config,
            min_users=feature_slice.min_users or config.min_slice_users,
        )
    return reports


def _event_of_target(ranking: Ranking, split: _Split, *, store: EventStore) -> NDArray[np.int64]:
    """Return the index in the log of each target's first test event."""
    targets = split.queries.targets
    event_L = ragged_ranges(store.first_event_index(split.user_row_B, "test"), targets.lengths)
    distinct_keys, first_L = np.unique(targets.pair_keys(bound=store.num_items), return_index=True)
    return event_L[first_L[np.searchsorted(distinct_keys, ranking.query_T * store.num_items + ranking.item_T)]]


def _slice_estimates(slices: Sequence[SliceReport]) -> Estimates:
    """Return the metrics of the slices without features, by names such as test/slice/cold_items/recall@20."""
    return {
        f"test/slice/{report.name.replace(' ', '_')}/{name}": Estimate(value, report.half_widths.get(name))
        for report in slices
        if "=" not in report.name
        for name, value in {"targets": report.num_targets, "users": report.num_users, **report.metrics}.items()
    }


def _is_top_only(config: EvaluationConfig) -> bool:
    """Return whether no metric needs the positions of the targets behind the top lists."""
    return "auc" not in config.metrics


def _num_listed(config: EvaluationConfig) -> int:
    """Return the length of the top lists, which has to contain the cut-offs of the served metrics."""
    return max(*config.ks, *(k for _, k in metrics.SERVED_METRICS.values()))


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


def _num_rankings(config: EvaluationConfig, *, export: ExportManifest, dataset: Dataset) -> int:
    """Return for how many queries the catalogue is ranked, without the baselines by popularity, which are fast."""
    num_linear = len({"cooccurrence", "closed_form"} & {*config.baselines})
    if export.num_items > config.closed_form.max_items:
        num_linear = 0
    num_rankings_by_split = {"validation": 1, "test": 1 + (dataset.item_embeddings is not None) + num_linear}
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
        popularity_order_I=popularity_before(split, store=store, interactions=interactions),
        cold_row_C=cold_rows(store, split),
    )


def _measure(
    prefix: str, split: _Split, item_vector_ID: Tensor, *, config: EvaluationConfig, on_ranked: Callable[[int], None]
) -> tuple[Estimates, Ranking]:
    """Return the metrics of a model on the catalogue and on the cold items, and its ranking of the catalogue."""
    order_I = split.popularity_order_I
    ranking = rank_served(
        split.queries,
        item_vector_ID=item_vector_ID,
        order_I=order_I,
        k=_num_listed(config),
        top_only=_is_top_only(config),
        on_progress=on_ranked,
    )
    estimates = prefixed(prefix, full_ranking_metrics(ranking, config=config)) if len(ranking.position_T) else {}
    unseen = replace(split.queries, seen=JaggedArray.empty(len(split.history)))  # a cold item is in no history
    cold_ranking = rank_among(unseen, item_vector_ID=item_vector_ID, order_I=order_I, candidate_rows=split.cold_row_C, k=0)
    return estimates | prefixed(f"{prefix}/cold", cold_metrics(cold_ranking, config=config)), ranking
