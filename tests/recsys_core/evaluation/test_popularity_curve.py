"""The popularity curve, compared with the evaluation of an export for each weight of the popularity term."""

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
from tests.recsys_core.evaluation.stage_folders import write_export_stage, write_interactions_stage

NUM_USERS, NUM_ITEMS, DIM = 40, 60, 8
RANDOM = np.random.default_rng(5)
ITEM_PROBABILITY = np.arange(1, NUM_ITEMS + 1) / np.arange(1, NUM_ITEMS + 1).sum()
TRAIN = [RANDOM.choice(NUM_ITEMS, 8, replace=False, p=ITEM_PROBABILITY).tolist() for _ in range(NUM_USERS)]
VALIDATION = [RANDOM.choice(NUM_ITEMS, 2, replace=False).tolist() for _ in range(NUM_USERS)]
TEST: list[list[int]] = [[0] for _ in range(NUM_USERS)]
ITEM_VECTORS, QUERY_VECTORS = RANDOM.normal(size=(NUM_ITEMS, DIM)), RANDOM.normal(size=(NUM_USERS, DIM))
ITEM_POPULARITY = item_popularity(np.bincount(np.concatenate(TRAIN), minlength=NUM_ITEMS))
CONFIG = EvaluationConfig(ks=(20, 5))


def write_interactions(folder: Path, **splits: Any) -> InteractionsManifest:
    return write_interactions_stage(
        folder / "interactions", **({"train": TRAIN, "validation": VALIDATION, "test": TEST, "num_items": NUM_ITEMS} | splits)
    )


def write_export(
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
    item_vectors, query_vectors = ITEM_VECTORS, QUERY_VECTORS
    if weight is not None:
        item_vectors = np.column_stack([item_vectors, ITEM_POPULARITY])
        query_vectors = np.column_stack([query_vectors, np.full(NUM_USERS, weight)])
    return write_export_stage(
        folder / f"export {weight}",
        item_vectors=item_vectors,
        queries={split: (range(NUM_USERS), query_vectors) for split in splits},
        spec=ModelSpec.sized(config, num_users=NUM_USERS, num_items=NUM_ITEMS),
    )


def test_each_point_has_the_metrics_of_an_export_with_its_weight(tmp_path: Path) -> None:
    interactions = write_interactions(tmp_path)
    curve = popularity_curve(CONFIG, export=write_export(tmp_path, weight=None), interactions=interactions, weights=[2.5, -0.5])
    assert [(point.weight, point.is_served) for point in curve] == [(-0.5, False), (0.0, True), (2.5, False)]
    for point in curve:
        export = write_export(tmp_path / str(point.weight), weight=point.weight)
        evaluation = evaluate(
            CONFIG, export=export, dataset=Dataset(interactions), folder=tmp_path / f"evaluation {point.weight}"
        )
        for name in ("recall@5", "ndcg@5", "coverage@5"):
            assert point.metrics[name] == pytest.approx(evaluation.metrics[f"validation/{name}"])
    lifts, novelties = ([point.metrics[f"{name}@5"] for point in curve] for name in ("popularity_lift", "novelty"))
    assert lifts == sorted(lifts) and novelties == sorted(novelties, reverse=True) and len({*lifts}) == 3


def test_a_popularity_term_does_not_change_the_popularity_curve(tmp_path: Path) -> None:
    interactions = write_interactions(tmp_path)
    curve_without_term, curve_with_term = (
        popularity_curve(CONFIG, export=write_export(tmp_path, weight=weight), interactions=interactions, weights=[0, 0.1, 1])
        for weight in (None, 0.1)
    )
    assert [point.metrics for point in curve_without_term] == [point.metrics for point in curve_with_term]
    assert [point.weight for point in curve_without_term if point.is_served] == [0]
    assert [point.weight for point in curve_with_term if point.is_served] == [0.1]


def test_an_ensemble_has_the_curve_of_one_model_with_the_vectors_of_all_members(tmp_path: Path) -> None:
    curve_by_num_members = {}
    interactions = write_interactions(tmp_path)
    for num_members in (1, 2):
        folder = tmp_path / f"{num_members} members"
        export = write_export(folder, weight=None, num_members=num_members)
        curve_by_num_members[num_members] = popularity_curve(CONFIG, export=export, interactions=interactions, weights=[0.5])
    assert curve_by_num_members[1] == curve_by_num_members[2]


def test_with_the_largest_default_weight_the_popularity_varies_half_as_much_as_the_scores(tmp_path: Path) -> None:
    curve = popularity_curve(CONFIG, export=write_export(tmp_path, weight=None), interactions=write_interactions(tmp_path))
    assert len(curve) == 7 and curve[0].weight == -curve[-1].weight
    score_std = (QUERY_VECTORS @ ITEM_VECTORS.T).std(axis=1).mean()
    assert curve[-1].weight * ITEM_POPULARITY.std() == pytest.approx(score_std / 2, rel=0.05)


def test_the_plot_of_the_curve_is_a_png_file(tmp_path: Path) -> None:
    curve = popularity_curve(
        CONFIG, export=write_export(tmp_path, weight=0.3), interactions=write_interactions(tmp_path), weights=[0.0]
    )
    assert plot_curve(curve, path=tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_a_curve_without_an_unseen_validation_target_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the validation split has no event"):
        popularity_curve(
            CONFIG, export=write_export(tmp_path, weight=None, splits=("test",)), interactions=write_interactions(tmp_path)
        )
    interactions = write_interactions(tmp_path / "seen", validation=[[items[0]] for items in TRAIN])
    with pytest.raises(InputError, match="had already seen all validation targets"):
        popularity_curve(CONFIG, export=write_export(tmp_path / "seen", weight=None), interactions=interactions)
