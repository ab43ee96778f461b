"""Stage `evaluate`: exact metrics of the model and its baselines over the full catalogue, from exported vectors.

Shapes: B queries, I items, D width, T (query, target) pairs, U users.
"""

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from recsys_core.dataset.events import EventStore
from recsys_core.errors import InputError, StageError
from recsys_core.evaluation import closed_form, diversity, metrics
from recsys_core.evaluation.baselines import recent_popularity_order, zero_shot_vectors
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
from recsys_core.evaluation.held_out import HeldOut, load_held_out, ranking_settings
from recsys_core.evaluation.metrics import TargetPositions
from recsys_core.evaluation.model_rankings import model_ranker, rank_with_vectors
from recsys_core.evaluation.ranking.catalogue import rank_by_scores
from recsys_core.evaluation.ranking.queries import Ranking
from recsys_core.evaluation.ranking.served import rank_by_order
from recsys_core.evaluation.slices import feature_owners, feature_slices, item_slices, user_slices
from recsys_core.manifests import (
    Dataset,
    EvaluationManifest,
    ExportManifest,
    FeaturesManifest,
    SliceReport,
    StageFolder,
    fingerprint_of,
)

logger = logging.getLogger(__name__)


class _Results:
    """The metrics of the rankers on the test split. The rankings themselves are not kept, because they are large.

    Attributes:
        values: metrics by name, including those without an interval.
        half_widths: see EvaluationManifest.
        positions: positions of the targets by ranker.
    """

    def __init__(
        self, config: EvaluationConfig, held_out: HeldOut, *, store: EventStore, vectors_RD: NDArray[np.float32] | None
    ) -> None:
        self._config, self._held_out, self._store, self._vectors_RD = config, held_out, store, vectors_RD
        self.values: dict[str, float] = {}
        self.half_widths: dict[str, float] = {}
        self.positions: dict[str, TargetPositions] = {}

    def add(self, estimates: Estimates) -> None:
        """Add metrics."""
        self.values |= {name: float(estimate.value) for name, estimate in estimates.items()}
        self.half_widths |= half_widths(estimates)

    def add_ranking(self, ranker: str, ranking: Ranking) -> None:
        """Add all metrics of a ranking of the catalogue by the model or a baseline."""
        prefix = "test" if ranker == "model" else f"baseline/{ranker}"
        self.positions[ranker] = ranking.target_positions()
        known_negatives = self._held_out.known_negatives
        self.add(prefixed(prefix, full_ranking_metrics(ranking, config=self._config, known_negatives=known_negatives)))
        k = min(self._config.ks)
        top_BK, train_count_I = ranking.top_BK[:, :k], self._store.train_count_I
        list_metrics = {
            "novelty": diversity.novelty(top_BK, train_count_I=train_count_I),
            "gini": diversity.gini(top_BK, num_items=ranking.num_items),
            "popularity_lift": diversity.popularity_lift(
                top_BK, history_item_L=self._held_out.history.values_L, train_count_I=train_count_I
            ),
        }
        vector_row_I = self._store.vector_rows("item")
        if self._vectors_RD is not None and vector_row_I is not None:
            list_metrics["diversity"] = diversity.intra_list_diversity(
                top_BK, vectors_RD=self._vectors_RD, vector_row_I=vector_row_I
            )
        self.values |= {f"{prefix}/{name}@{k}": value for name, value in list_metrics.items() if not math.isnan(value)}


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
        store = EventStore.open(interactions)
        load = partial(load_held_out, config=config, store=store, export=export, interactions=interactions)
        on_ranked = _counter(on_progress, total=_num_rankings(config, export=export, dataset=dataset))
        rank = model_ranker(config, export=export, on_ranked=on_ranked)
        held_out = load("test")
        vectors_RD = None if item_embeddings is None else np.load(item_embeddings.vectors_path("item"), mmap_mode="r")
        results = _Results(config, held_out, store=store, vectors_RD=vectors_RD)
        if export.num_queries.get("validation", 0):
            validation = load("validation")
            ranking, cold_ranking = rank("validation", validation)
            if len(ranking.position_T):
                estimates = full_ranking_metrics(ranking, config=config, known_negatives=validation.known_negatives)
                results.add(prefixed("validation", estimates))
            results.add(prefixed("validation/cold", cold_metrics(cold_ranking, config=config)))
        ranking, cold_ranking = rank("test", held_out)
        if not len(ranking.position_T):
            raise InputError(
                f"the users had already seen all {ranking.num_seen_targets} test targets; set evaluation.exclude_seen to false"
            )
        results.add_ranking("model", ranking)
        results.add(prefixed("test/cold", cold_metrics(cold_ranking, config=config)))
        slices = _slices(ranking, held_out, config=config, store=store, features=dataset.features)
        results.add(_slice_estimates(slices))
        for name, ranking in _rank_baselines(config, held_out, store=store, on_ranked=on_ranked):
            results.add_ranking(name, ranking)
        if vectors_RD is not None:
            vector_row_I = store.vector_rows("item")
            assert vector_row_I is not None  # the ingest requires that items have vectors
            query_BD, vector_ID = zero_shot_vectors(vectors_RD, vector_row_I=vector_row_I, histories=held_out.history)
            every_user = replace(held_out.queries, query_BD=query_BD, is_known_B=np.ones(len(query_BD), np.bool_))
            ranking, cold_ranking = rank_with_vectors(
                replace(held_out, queries=every_user), item_vector_ID=vector_ID, config=config, on_ranked=on_ranked
            )
            results.add_ranking("zero_shot", ranking)
            results.add(prefixed("baseline/zero_shot/cold", cold_metrics(cold_ranking, config=config)))
        _write_user_metrics(results.positions, held_out, config=config, path=output_folder / metrics.USER_METRICS_FILE)
        metrics.write_positions(results.positions, user_row_B=held_out.user_row_B, path=output_folder / metrics.POSITIONS_FILE)
        np.save(output_folder / "popularity.npy", held_out.popularity_order_I)
        (output_folder / "metrics.json").write_text(json.dumps(results.values, indent=2))
        return stage.commit(metrics=results.values, half_widths=results.half_widths, slices=slices)


def _rank_baselines(
    config: EvaluationConfig, held_out: HeldOut, *, store: EventStore, on_ranked: Callable[[int], None]
) -> Iterator[tuple[str, Ranking]]:
    """Yield the name and the ranking of each baseline that needs only the log, and therefore cannot rank cold items."""
    settings, order_I = ranking_settings(config), held_out.popularity_order_I
    k = settings.k
    rank_in_order = partial(rank_by_order, held_out.queries, k=k)
    yield "popularity", rank_in_order(order_I=order_I)
    if "recent_popularity" in config.baselines and store.has_times:
        recent_order_I = recent_popularity_order(
            "test", store=store, days=config.recent_days, popularity_order_I=held_out.popularity_order_I
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
        scores = model(store=store, histories=held_out.history, order_I=order_I)
        yield (
            name,
            rank_by_scores(
                held_out.queries, **scores._asdict(), row_C=order_I, k=k, top_only=settings.top_only, on_progress=on_ranked
            ),
        )


def _slices(
    ranking: Ranking, held_out: HeldOut, *, config: EvaluationConfig, store: EventStore, features: FeaturesManifest | None
) -> tuple[SliceReport, ...]:
    """Return the metrics of the slices by popularity, by history and by features."""
    user_row_B, user_T, item_T = held_out.user_row_B, ranking.query_T, ranking.item_T
    masks = item_slices(store.train_count_I, item_T=item_T) | user_slices(store.train_count_U[user_row_B], user_T=user_T)
    masks |= {"warm items": ~masks["cold items"], "known users": ~masks["new users"]}
    reports = slice_reports(ranking, masks, config=config, min_users=config.min_slice_users)
    for feature_slice in config.slices:
        owner_T = feature_owners(feature_slice.feature, store=store, user_row_U=user_row_B, user_T=user_T, item_T=item_T)
        reports += slice_reports(
            ranking,
            feature_slices(feature_slice, features, owner_T=owner_T),
            config=config,
            min_users=feature_slice.min_users or config.min_slice_users,
        )
    return reports


def _slice_estimates(slices: Sequence[SliceReport]) -> Estimates:
    """Return the metrics of the slices without features, by names such as test/slice/cold_items/recall@20."""
    return {
        f"test/slice/{report.name.replace(' ', '_')}/{name}": Estimate(value, report.half_widths.get(name))
        for report in slices
        if "=" not in report.name
        for name, value in {"targets": report.num_targets, "users": report.num_users, **report.metrics}.items()
    }


def _write_user_metrics(
    positions_by_ranker: Mapping[str, TargetPositions], held_out: HeldOut, *, config: EvaluationConfig, path: Path
) -> None:
    """Write the metrics of each test user, by which the gate compares served versions with baselines.

    A served version never recommends items that the user has seen, so rankings with these items are left out.
    """
    if not config.exclude_seen:
        unseen = replace(held_out.queries, seen=held_out.history)
        ranking = rank_by_order(unseen, order_I=held_out.popularity_order_I, k=0)
        positions_by_ranker = {"popularity": ranking.target_positions()}
    user_metrics = {
        ranker: metrics.UserMetrics.of(positions, user_row_B=held_out.user_row_B)
        for ranker, positions in positions_by_ranker.items()
    }
    metrics.write_user_metrics(user_metrics, path)


def _num_rankings(config: EvaluationConfig, *, export: ExportManifest, dataset: Dataset) -> int:
    """Return for how many queries the catalogue is ranked, without the baselines by popularity, which are fast."""
    num_linear = len({"cooccurrence", "closed_form"} & {*config.baselines})
    if export.num_items > config.closed_form.max_items:
        num_linear = 0
    num_model = int(export.ranking != ranking_settings(config))
    num_rankings_by_split = {"validation": num_model, "test": num_model + (dataset.item_embeddings is not None) + num_linear}
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
