"""Trade-off between accuracy, coverage and novelty: metrics of the validation users with several weights of item popularity.

The items of one export are ranked with each weight. Serving with this weight (`model.popularity`) gives the same rankings.

Shapes: B queries, I items, D width, K length of the top list, T ranked (query, target) pairs, L items of all histories.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from recsys_core import plots
from recsys_core.config import Frozen
from recsys_core.dataset.events import EventStore
from recsys_core.errors import InputError
from recsys_core.evaluation import diversity, metrics
from recsys_core.evaluation.config import EvaluationConfig
from recsys_core.evaluation.held_out import HeldOutSplit, HeldOutUsers
from recsys_core.evaluation.ranking.served import rank_as_served
from recsys_core.manifests import ExportManifest, InteractionsManifest
from recsys_core.models.score_terms import append_popularity, item_popularity
from recsys_core.models.spec import ModelSpec

DEFAULT_MULTIPLES = (-0.5, -0.25, -0.1, 0.0, 0.1, 0.25, 0.5)
"""The default weights, as multiples of the weight with which the popularity term varies as much as the scores of a user."""
MAX_SAMPLED_QUERIES = 256
"""The variation of the scores is estimated from at most this many queries."""


class CurvePoint(Frozen):
    """The metrics of the validation users with one weight, by <metric>@<k>.

    Attributes:
        is_served: whether the export has this weight.
    """

    weight: float
    is_served: bool
    metrics: dict[str, float]


def popularity_curve(
    config: EvaluationConfig,
    *,
    export: ExportManifest,
    interactions: InteractionsManifest,
    weights: Sequence[float] = (),
) -> list[CurvePoint]:
    """Return the metrics at the smallest cut-off for each weight and for the weight of the export, ordered by weight.

    weights: weights of the popularity term; empty for `default_weights`.

    Raises:
        InputError: the validation split has no unseen target.
    """
    if not export.num_queries.get("validation", 0):
        raise InputError("the validation split has no event, so there is no curve; change interactions.split")
    store = EventStore.open(interactions)
    spec = ModelSpec.model_validate_json(export.path("model.json").read_bytes())
    # HeldOutSplit loads the query vectors only if the manifest has no ranking.
    export_without_ranking = export.model_copy(update={"ranking": None})
    users = HeldOutSplit(
        "validation", config=config, store=store, export=export_without_ranking, interactions=interactions
    ).load()
    query_BD, item_vector_ID = users.queries.query_BD, torch.from_numpy(np.load(export.path("item_vectors.npy")))
    # In single precision, a weight of 0.1 is 0.10000000149. It is rounded, so that it equals the 0.1 in `weights`.
    served_weight = float(f"{float(query_BD[0, -1]):.6g}") if spec.config.has_popularity else 0.0
    if spec.config.has_popularity:
        query_BD, item_vector_ID = query_BD[:, :-1], item_vector_ID[:, :-1]
    popularity_I = torch.from_numpy(item_popularity(store.train_count_I))
    weights = weights or default_weights(query_BD, item_vector_ID=item_vector_ID, popularity_I=popularity_I)
    item_vector_ID, points = append_popularity(item_vector_ID, popularity_I), []
    for weight in sorted({*weights, served_weight}):
        weighted_query_BD = append_popularity(query_BD, torch.full((len(query_BD),), weight))
        weighted_users = replace(users, queries=replace(users.queries, query_BD=weighted_query_BD))
        value_by_metric = _metrics_of_ranking(config, weighted_users, item_vector_ID=item_vector_ID, store=store)
        points.append(CurvePoint(weight=weight, is_served=weight == served_weight, metrics=value_by_metric))
    return points


def default_weights(query_BD: Tensor, *, item_vector_ID: Tensor, popularity_I: Tensor) -> list[float]:
    """Return weights around 0. With the largest weight, the popularity term varies half as much as the scores of a query.

    >>> item_vector_ID, popularity_I = torch.tensor([[0.0], [0.2]]), torch.tensor([0.0, 1.0])
    >>> default_weights(torch.ones(1, 1), item_vector_ID=item_vector_ID, popularity_I=popularity_I)
    [-0.1, -0.05, -0.02, 0.0, 0.02, 0.05, 0.1]
    """
    query_indices = np.unique(np.linspace(0, len(query_BD) - 1, MAX_SAMPLED_QUERIES).astype(np.int64))
    score_BI = query_BD[torch.from_numpy(query_indices)] @ item_vector_ID.T
    unit_weight = float(score_BI.std(dim=1).mean() / popularity_I.std().clamp(min=1e-6))
    return [float(f"{multiple * unit_weight:.2g}") for multiple in DEFAULT_MULTIPLES]


def _metrics_of_ranking(
    config: EvaluationConfig, users: HeldOutUsers, *, item_vector_ID: Tensor, store: EventStore
) -> dict[str, float]:
    """Return the metrics of the ranking by these vectors, by <metric>@<k>."""
    k, train_count_I = min(config.ks), store.train_count_I
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ranking = rank_as_served(
        users.queries, item_vector_ID=item_vector_ID, order_I=users.popularity_order_I, k=k, top_only=True, device=device
    )
    if not len(ranking.position_T):
        raise InputError("the users had already seen all validation targets; set evaluation.exclude_seen to false")
    targets, history_item_L = ranking.target_positions(), users.history.values_L
    value_by_metric = {
        "recall": metrics.recall(targets, k=k).mean(),
        "ndcg": metrics.ndcg(targets, k=k).mean(),
        "coverage": diversity.coverage(ranking.top_BK, k=k, num_items=ranking.num_items),
        "novelty": diversity.novelty(ranking.top_BK, train_count_I=train_count_I),
        "popularity_lift": diversity.popularity_lift(
            ranking.top_BK, history_item_L=history_item_L, train_count_I=train_count_I
        ),
    }
    return {f"{name}@{k}": float(value) for name, value in value_by_metric.items() if np.isfinite(value)}


def plot_curve(points: Sequence[CurvePoint], *, path: Path) -> Path:
    """Write a PNG that plots coverage and novelty against the NDCG, with a point per weight. Return `path`."""
    ndcg_name, coverage_name, novelty_name = (
        next(name for name in points[0].metrics if name.startswith(f"{metric}@")) for metric in ("ndcg", "coverage", "novelty")
    )
    figure, panels = plots.new_panels(2, title="Weights of item popularity, validation users", size=(6.4, 6.4))
    ndcg_values = [point.metrics[ndcg_name] for point in points]
    best_index = int(np.argmax(ndcg_values))
    for axes, name in zip(panels, (coverage_name, novelty_name), strict=True):
        metric_values = [point.metrics[name] for point in points]
        axes.plot(ndcg_values, metric_values, color=plots.BLUE, marker="o", markersize=4)
        for index, (point, x, y) in enumerate(zip(points, ndcg_values, metric_values, strict=True)):
            label_offset = (6, 3) if index < best_index else (6, -9)  # the curve turns at the best weight
            axes.annotate(
                f"{point.weight:.3g}", (x, y), xytext=label_offset, textcoords="offset points", fontsize=8, color=plots.INK
            )
            if point.is_served:
                axes.plot(x, y, color=plots.ORANGE, marker="o", markersize=8, linestyle="none", label="weight of this run")
        axes.margins(0.08)
        axes.set_ylabel(name if name != novelty_name else f"{name}, bits")
    plots.legend_above(panels[0])
    panels[1].set_xlabel(ndcg_name)
    return plots.save_png(figure, path)
