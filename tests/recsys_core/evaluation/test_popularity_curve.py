"""The curve over the weights of item popularity: a small log by hand, and exports with and without the term."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recsys_core.errors import InputError
from recsys_core.evaluation.config import EvaluationConfig
from recsys_core.evaluation.evaluate import evaluate
from recsys_core.evaluation.popularity_curve import plot_curve, popularity_curve
from recsys_core.manifests import Dataset, ExportManifest, InteractionsManifest
from recsys_core.models.config import TwoTowerConfig
from recsys_core.models.score_terms import item_popularity
from recsys_core.models.spec import ModelSpec
from tests.recsys_core.evaluation.stage_folders import export_stage, interactions_stage

NUM_USERS, NUM_ITEMS, DIM = 40, 60, 8
RANDOM = np.random.default_rng(5)
TRAIN = [RANDOM.choice(NUM_ITEMS, 8, replace=False, p=np.arange(1, NUM_ITEMS + 1) / 1830).tolist() for _ in range(NUM_USERS)]
VALIDATION = [RANDOM.choice(NUM_ITEMS, 2, replace=False).tolist() for _ in range(NUM_USERS)]
TEST: list[list[int]] = [[0] for _ in range(NUM_USERS)]
ITEM_VECTORS, QUERY_VECTORS = RANDOM.normal(size=(NUM_ITEMS, DIM)), RANDOM.normal(size=(NUM_USERS, DIM))
POPULARITY = item_popularity(np.bincount(np.concatenate(TRAIN), minlength=NUM_ITEMS))
CONFIG = EvaluationConfig(ks=(20, 5))


def interactions_in(folder: Path, **splits: Any) -> InteractionsManifest:
    return interactions_stage(
        folder / "interactions", **({"train": TRAIN, "validation": VALIDATION, "test": TEST, "num_items": NUM_ITEMS} | splits)
    )


def export_in(
    folder: Path, *, weight: float | None, splits: tuple[str, ...] = ("validation", "test"), num_members: int = 1
) -> ExportManifest:
    """Write an export. weight: weight of its popularity term; None for an export without the term."""
    popularity = {"kind": "none"} if weight is None else {"kind": "fixed", "weight": weight}
    config = TwoTowerConfig.model_validate(
        {
            "embedding_dim": DIM // num_members,
            "num_members": num_members,
            "similarity": "dot",
            "popularity": popularity,
        }
    )
    items, queries = ITEM_VECTORS, QUERY_VECTORS
    if weight is not None:
        items = np.column_stack([items, POPULARITY])
        queries = np.column_stack([queries, np.full(NUM_USERS, weight)])
    return export_stage(
        folder / f"export {weight}",
        item_vectors=items,
        queries={split: (range(NUM_USERS), queries) for split in splits},
        spec=ModelSpec.sized(config, num_users=NUM_USERS, num_items=NUM_ITEMS),
    )


def test_each_point_has_the_metrics_of_an_export_with_its_weight(tmp_path: Path) -> None:
    interactions = interactions_in(tmp_path)
    curve = popularity_curve(CONFIG, export=export_in(tmp_path, weight=None), interactions=interactions, weights=[2.5, -0.5])
    assert [(point.weight, point.is_served) for point in curve] == [(-0.5, False), (0.0, True), (2.5, False)]
    for point in curve:
        export = export_in(tmp_path / str(point.weight), weight=point.weight)
        evaluation = evaluate(
            CONFIG, export=export, dataset=Dataset(interactions), folder=tmp_path / f"evaluation {point.weight}"
        )
        for name in ("recall@5", "ndcg@5", "coverage@5"):
            assert point.metrics[name] == pytest.approx(evaluation.metrics[f"validation/{name}"])
    lifts, novelties = ([point.metrics[f"{name}@5"] for point in curve] for name in ("popularity_lift", "novelty"))
    assert lifts == sorted(lifts) and novelties == sorted(novelties, reverse=True) and len({*lifts}) == 3


def test_an_export_with_a_term_gives_the_curve_of_the_same_model_without_one(tmp_path: Path) -> None:
    interactions = interactions_in(tmp_path)
    without, with_term = (
        popularity_curve(CONFIG, export=export_in(tmp_path, weight=weight), interactions=interactions, weights=[0, 0.1, 1])
        for weight in (None, 0.1)
    )
    assert [point.metrics for point in without] == [point.metrics for point in with_term]
    assert [point.weight for point in without if point.is_served] == [0]
    assert [point.weight for point in with_term if point.is_served] == [0.1]


def test_the_curve_of_an_ensemble_ranks_by_the_vectors_of_all_members(tmp_path: Path) -> None:
    tables = {}
    interactions = interactions_in(tmp_path)
    for num_members in (1, 2):
        folder = tmp_path / f"{num_members} members"
        export = export_in(folder, weight=None, num_members=num_members)
        tables[num_members] = popularity_curve(CONFIG, export=export, interactions=interactions, weights=[0.5])
    assert tables[1] == tables[2]


def test_the_largest_default_weight_moves_items_half_as_far_as_the_scores(tmp_path: Path) -> None:
    curve = popularity_curve(CONFIG, export=export_in(tmp_path, weight=None), interactions=interactions_in(tmp_path))
    assert len(curve) == 7 and curve[0].weight == -curve[-1].weight
    score_std = (QUERY_VECTORS @ ITEM_VECTORS.T).std(axis=1).mean()
    assert curve[-1].weight * POPULARITY.std() == pytest.approx(score_std / 2, rel=0.05)


def test_the_plot_marks_the_weight_of_the_export(tmp_path: Path) -> None:
    curve = popularity_curve(
        CONFIG, export=export_in(tmp_path, weight=0.3), interactions=interactions_in(tmp_path), weights=[0.0]
    )
    assert plot_curve(curve, path=tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_without_an_unseen_validation_target_there_is_no_curve(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the validation split has no event"):
        popularity_curve(
            CONFIG, export=export_in(tmp_path, weight=None, splits=("test",)), interactions=interactions_in(tmp_path)
        )
    seen = interactions_in(tmp_path / "seen", validation=[[items[0]] for items in TRAIN])
    with pytest.raises(InputError, match="had already seen all validation targets"):
        popularity_curve(CONFIG, export=export_in(tmp_path / "seen", weight=None), interactions=seen)
