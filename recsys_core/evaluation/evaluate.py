"""Stage `evaluate`: exact metrics of the model and its baselines over the full catalogue, from the rankings of the export.

Shapes: B queries, I items, D width, T (query, target) pairs, U users, K length of the top list, L items of all histories, R
pretrained vectors.
"""

import json
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from recsys_core.dataset.events import EventStore
from recsys_core.errors import InputError, StageError
from recsys_core.evaluation import closed_form, metrics
from recsys_core.evaluation.baselines import recent_popularity_order
from recsys_core.evaluation.config import EvaluationConfig
from recsys_core.evaluation.estimates import (
    ColdMetrics,
    Columns,
    Estimate,
    Estimates,
    ListMetrics,
    RankingMetrics,
    half_widths,
    prefixed,
)
from recsys_core.evaluation.held_out import HeldOutSplit, HeldOutUsers, ranking_settings
from recsys_core.evaluation.metrics import TargetPositions
from recsys_core.evaluation.model_rankings import has_ranking, model_rankings, zero_shot_rankings
from recsys_core.evaluation.ranking.catalogue import rank_by_scores
from recsys_core.evaluation.ranking.queries import Ranking
from recsys_core.evaluation.ranking.served import rank_by_order
from recsys_core.evaluation.slices import slice_reports
from recsys_core.manifests import (
    Dataset,
    EvaluationManifest,
    ExportManifest,
    SliceReport,
    StageFolder,
)

logger = logging.getLogger(__name__)


class _RankerMetrics:
    """The metrics of all rankers (the model and the baselines).

    Rankings are added in chunks of users. Scratch files store the metrics of each user and the position of each target.

    Attributes:
        value_by_metric: values by the names of the metrics.
        half_widths: see EvaluationManifest.
        rankers: names of the rankers of the test split.
    """

    def __init__(
        self, config: EvaluationConfig, columns: Columns, *, store: EventStore, vectors_RD: NDArray[np.float32] | None
    ) -> None:
        self._config, self._columns, self._store, self._vectors_RD = config, columns, store, vectors_RD
        self.value_by_metric: dict[str, float] = {}
        self.half_widths: dict[str, float] = {}
        self.rankers: list[str] = []

    def add(self, estimates: Estimates) -> None:
        """Add metrics by name."""
        self.value_by_metric |= {name: float(estimate.value) for name, estimate in estimates.items()}
        self.half_widths |= half_widths(estimates)

    def add_validation(self, rankings: Iterable[tuple[HeldOutUsers, Ranking, Ranking]]) -> None:
        """Add the metrics of the model on the validation split, from rankings of the catalogue and of the cold items."""
        catalogue_metrics, cold_metrics = self._ranking_metrics("validation"), self._cold_metrics("validation")
        for users, ranking, cold_ranking in rankings:
            catalogue_metrics.add(ranking, ranking.target_positions(), known_negatives=users.known_negatives)
            cold_metrics.add(cold_ranking)
        if catalogue_metrics.num_targets:
            self.add(prefixed("validation", catalogue_metrics.estimates()))
        self.add(prefixed("validation/cold", cold_metrics.estimates()))

    def add_ranker(self, ranker: str, rankings: Iterable[tuple[HeldOutUsers, Ranking, Ranking | None]]) -> None:
        """Add all metrics of the model or a baseline on the test split, from its rankings of the catalogue and of cold items.

        Raises InputError if no test user has a target.
        """
        prefix = "test" if ranker == "model" else f"baseline/{ranker}"
        catalogue_metrics, cold_metrics = self._ranking_metrics(prefix), self._cold_metrics(prefix)
        list_metrics = ListMetrics(
            self._columns, prefix, k=min(self._config.ks), store=self._store, vectors_RD=self._vectors_RD
        )
        for users, ranking, cold_ranking in rankings:
            targets = ranking.target_positions()
            catalogue_metrics.add(ranking, targets, known_negatives=users.known_negatives)
            list_metrics.add(ranking.top_BK, history_item_L=users.history.values_L)
            self._append_chunk(ranker, targets, users=users, ranking=ranking)
            if cold_ranking is not None:
                cold_metrics.add(cold_ranking)
        if not catalogue_metrics.num_targets:
            raise InputError(
                f"the users had already seen all {catalogue_metrics.num_seen_targets} test targets; set "
                "evaluation.exclude_seen to false"
            )
        self.rankers.append(ranker)
        self.add(prefixed(prefix, catalogue_metrics.estimates()))
        self.add(prefixed(prefix, list_metrics.estimates()))
        self.add(prefixed(f"{prefix}/cold", cold_metrics.estimates()))

    def append_user_metrics(self, ranker: str, targets: TargetPositions, *, users: HeldOutUsers) -> None:
        """Append the COMPARED_METRICS of a chunk of users to scratch files, for `write`."""
        user_metrics = metrics.UserMetrics.of(targets, user_row_B=users.user_row_B)
        for metric, value_U in {"user_row": user_metrics.user_row_U, **user_metrics.value_U_by_metric}.items():
            self._columns.append(f"user/{ranker}/{metric}", value_U)

    def write(self, output_folder: Path) -> None:
        """Write the files with the metrics of each user and the positions of each target.

        A served version never recommends items that the user has seen. With `exclude_seen: false`, the rankings contain seen
        items. The metrics of each user are then written only for popularity, from a second ranking without the seen items.
        """
        read_column = self._columns.read
        compared_rankers = self.rankers if self._config.exclude_seen else ["popularity"]
        user_metrics_by_ranker = {
            ranker: metrics.UserMetrics(
                read_column(f"user/{ranker}/user_row"),
                {metric: read_column(f"user/{ranker}/{metric}") for metric in metrics.COMPARED_METRICS},
            )
            for ranker in compared_rankers
        }
        metrics.write_user_metrics(user_metrics_by_ranker, output_folder / metrics.USER_METRICS_FILE)
        metrics.write_positions(
            {ranker: read_column(f"position/{ranker}") for ranker in self.rankers},
            user_row_T=read_column("user_row_T"),
            num_candidates_T=read_column("num_candidates_T"),
            path=output_folder / metrics.POSITIONS_FILE,
        )

    def _append_chunk(self, ranker: str, targets: TargetPositions, *, users: HeldOutUsers, ranking: Ranking) -> None:
        """Append the positions and the metrics of a chunk of users to scratch files."""
        self._columns.append(f"position/{ranker}", targets.position_T)
        if self._config.exclude_seen:
            self.append_user_metrics(ranker, targets, users=users)
        if ranker == "model":
            user_row_U = users.user_row_B[targets.original_user_U]
            self._columns.append("user_row_T", user_row_U[targets.user_T])
            self._columns.append("num_candidates_T", targets.num_candidates_U[targets.user_T])
            self._columns.append("target/user_index", ranking.query_T + len(self._columns.read("target/user_row")))
            self._columns.append("target/user_row", users.user_row_B)
            self._columns.append("target/item", ranking.item_T)
            self._columns.append("target/position", ranking.position_T)

    def _ranking_metrics(self, prefix: str) -> RankingMetrics:
        return RankingMetrics(self._columns, prefix, config=self._config)

    def _cold_metrics(self, prefix: str) -> ColdMetrics:
        return ColdMetrics(self._columns, f"{prefix}/cold", config=self._config)


def evaluate(
    config: EvaluationConfig,
    *,
    export: ExportManifest,
    dataset: Dataset,
    folder: Path,
    on_progress: Callable[[int, int], None] = lambda num_ranked, num_queries: None,
) -> EvaluationManifest:
    """Compute the metrics of the model on the validation and test splits, and the metrics of the baselines on the test split.

    As in the Retriever, items are ranked by the user's query vector, or by popularity if the user is unknown to the model.

    Metric names are flat: test/recall@20, validation/ndcg@10, baseline/popularity/recall@20, test/slice/cold_items/recall@20,
    test/users.

    An item without an event before the split is cold. Metrics under <split>/cold/ and baseline/zero_shot/cold/ come from a
    ranking of the cold items only. They are averaged over the users with a cold target, and left out if there is no such user.
    A cut-off K is used only if there are more than K cold items.

    on_progress: called with the number of queries ranked so far, and the number of all queries to rank.

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
    stage = StageFolder(
        folder, EvaluationManifest, inputs=["evaluate", config, export, interactions, dataset.embeddings, sliced_features]
    )
    if stage.manifest is not None:
        return stage.manifest
    if not export.num_queries.get("test", 0):
        raise InputError("the test split has no event, so nothing can be evaluated; change interactions.split")
    with stage.writing() as output_folder:
        store, scratch_folder = EventStore.open(interactions), output_folder / "scratch"
        scratch_folder.mkdir()
        columns = Columns(scratch_folder)
        open_split = partial(HeldOutSplit, config=config, store=store, export=export, interactions=interactions)
        on_ranked = _progress_counter(
            on_progress, num_queries_to_rank=_num_queries_to_rank(config, export=export, dataset=dataset)
        )
        rank_split = partial(model_rankings, config=config, export=export, on_ranked=on_ranked)
        vectors_RD = None if item_embeddings is None else np.load(item_embeddings.vectors_path("item"), mmap_mode="r")
        ranker_metrics = _RankerMetrics(config, columns, store=store, vectors_RD=vectors_RD)
        if export.num_queries.get("validation", 0):
            ranker_metrics.add_validation(rank_split(open_split("validation")))
        test_split = open_split("test")
        ranker_metrics.add_ranker("model", rank_split(test_split))
        slices = slice_reports(columns, config=config, store=store, features=dataset.features)
        ranker_metrics.add(_slice_estimates(slices))
        for baseline, rank_chunk in _baselines(config, order_I=test_split.popularity_order_I, store=store, on_ranked=on_ranked):
            ranker_metrics.add_ranker(baseline, ((users, rank_chunk(users), None) for users in test_split))
        if vectors_RD is not None:
            rankings = zero_shot_rankings(
                test_split, vectors_RD, config=config, export=export, store=store, on_ranked=on_ranked
            )
            ranker_metrics.add_ranker("zero_shot", rankings)
        if not config.exclude_seen:
            for users in test_split:
                served_queries = replace(users.queries, seen=users.history)  # a served version excludes seen items
                ranking = rank_by_order(served_queries, order_I=test_split.popularity_order_I, k=0)
                ranker_metrics.append_user_metrics("popularity", ranking.target_positions(), users=users)
        ranker_metrics.write(output_folder)
        np.save(output_folder / "popularity.npy", test_split.popularity_order_I)
        (output_folder / "metrics.json").write_text(json.dumps(ranker_metrics.value_by_metric, indent=2))
        shutil.rmtree(scratch_folder)
        return stage.commit(metrics=ranker_metrics.value_by_metric, half_widths=ranker_metrics.half_widths, slices=slices)


def _baselines(
    config: EvaluationConfig, *, order_I: NDArray[np.int32], store: EventStore, on_ranked: Callable[[int], None]
) -> Iterator[tuple[str, Callable[[HeldOutUsers], Ranking]]]:
    """Yield the name of each baseline that needs only the log, and its function that ranks the items for a chunk of users.

    These baselines cannot rank cold items.
    """
    settings = ranking_settings(config)

    def rank_in_order(users: HeldOutUsers, *, order_I: NDArray[np.int32]) -> Ranking:
        return rank_by_order(users.queries, order_I=order_I, k=settings.k)

    def rank_linearly(users: HeldOutUsers, *, model: closed_form.LinearModel) -> Ranking:
        # Without a history, all scores are 0, so the items keep the order of `order_I`, by popularity.
        linear_scores = model(users.history)._asdict()
        return rank_by_scores(
            users.queries, **linear_scores, row_C=order_I, k=settings.k, top_only=settings.top_only, on_progress=on_ranked
        )

    yield "popularity", partial(rank_in_order, order_I=order_I)
    if "recent_popularity" in config.baselines and store.has_times:
        recent_order_I = recent_popularity_order("test", store=store, days=config.recent_days, popularity_order_I=order_I)
        yield "recent_popularity", partial(rank_in_order, order_I=recent_order_I)
    linear_baselines = config.linear_baselines(store.num_items)
    if linear_baselines != config.linear_baselines():
        logger.info(
            "the baselines %s are left out: the catalogue has %d items, but evaluation.closed_form.max_items is %d",
            " and ".join(config.linear_baselines()), store.num_items, config.closed_form.max_items,
        )  # fmt: skip
    for baseline in linear_baselines:
        fit_model = (
            closed_form.cooccurrence_model
            if baseline == "cooccurrence"
            else partial(closed_form.linear_model, config.closed_form)
        )
        yield baseline, partial(rank_linearly, model=fit_model(store=store, order_I=order_I))


def _slice_estimates(slices: Sequence[SliceReport]) -> Estimates:
    """Return the metrics of all slices except feature slices, by names such as test/slice/cold_items/recall@20."""
    return {
        f"test/slice/{report.name.replace(' ', '_')}/{name}": Estimate(value, report.half_widths.get(name))
        for report in slices
        if "=" not in report.name  # the name of a feature slice is <feature>=<value>
        for name, value in {"targets": report.num_targets, "users": report.num_users, **report.metrics}.items()
    }


def _num_queries_to_rank(config: EvaluationConfig, *, export: ExportManifest, dataset: Dataset) -> int:
    """Return the number of queries to rank, summed over the rankers. Fast rankings by popularity are not included."""
    num_linear_baselines = len(config.linear_baselines(export.num_items))
    num_model_rankings = int(not has_ranking(export, config=config))
    ranks_zero_shot = dataset.item_embeddings is not None and not has_ranking(export, config=config, ranker="zero_shot")
    num_rankings_by_split = {
        "validation": num_model_rankings,
        "test": num_model_rankings + ranks_zero_shot + num_linear_baselines,
    }
    return sum(
        min(num_queries, config.max_users or num_queries) * num_rankings_by_split[split]
        for split, num_queries in export.num_queries.items()
    )


def _progress_counter(on_progress: Callable[[int, int], None], *, num_queries_to_rank: int) -> Callable[[int], None]:
    """Return a function that adds up numbers of queries, and calls `on_progress` with their sum and `num_queries_to_rank`."""
    num_ranked_queries = 0

    def add_queries(num_queries: int) -> None:
        nonlocal num_ranked_queries
        num_ranked_queries += num_queries
        on_progress(num_ranked_queries, num_queries_to_rank)

    return add_queries
