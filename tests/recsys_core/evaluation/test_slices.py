"""Slices of the test targets by feature values, counted by hand."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from recsys_core.dataset.events import EventStore
from recsys_core.dataset.feature_store import Feature, FeatureStore
from recsys_core.errors import InputError
from recsys_core.evaluation.config import EvaluationConfig, FeatureSlice
from recsys_core.evaluation.evaluate import evaluate
from recsys_core.evaluation.slices import feature_slices, guarded_slices
from recsys_core.manifests import Dataset, EvaluationManifest, FeaturesManifest, IngestedFeature, InteractionsManifest
from tests.recsys_core.evaluation.stage_folders import write_export_stage, write_features_stage, write_interactions_stage

INGESTED_BY_FEATURE = {
    name: IngestedFeature(
        kind=kind,
        num_rows=3,
        num_values=0,
        num_out_of_vocabulary=0,
        num_missing=0,
        definition="",
        is_continued=False,
        boundaries=boundaries,
        mean=mean,
    )
    for name, kind, boundaries, mean in (
        ("item.brand", "categorical", None, None),
        ("item.tags", "list", None, None),
        ("user.age", "numeric", (30.0,), None),
        ("user.joined", "numeric", (1_000_000.0, 1_000_001.0, 1_000_002.0), None),
        ("item.price", "numeric", None, 2.0),
        ("context.hash", "categorical", None, None),
    )
}


@pytest.fixture
def features(tmp_path: Path) -> FeaturesManifest:
    """Features of four items, three users and eight events. Brands and tags have a vocabulary."""

    def feature(rows: list[int], **arrays: np.ndarray) -> Feature:
        return Feature(np.array(rows, np.int32), arrays.get("offset"), arrays.get("weights"))

    store = FeatureStore(
        {
            "item.brand": feature([1, 2, 1, 0]),
            "item.tags": feature([1, 2, 2], offset=np.array([0, 2, 3, 3, 3])),
            "user.age": feature([1, 2, 2]),
            "user.joined": feature([2, 3, 3]),
            "item.price": feature([1, 1, 1, 1], weights=np.ones(4, np.float32)),
            "context.hash": feature([1, 1, 2, 1, 2, 2, 2, 1]),
        }
    )
    manifest = write_features_stage(tmp_path / "features", store, ingested_by_feature=INGESTED_BY_FEATURE)
    for name in ("item.brand", "item.tags"):
        pq.write_table(pa.table({"value": [None, "red", "blue"]}), manifest.folder / f"{name}.vocabulary.parquet")
    files = {
        **manifest.files,
        **{f"{name}.vocabulary.parquet": manifest.files["item.brand.row.npy"] for name in ("item.brand", "item.tags")},
    }
    return manifest.model_copy(update={"files": files})


@pytest.mark.parametrize(
    ("name", "owner_rows", "expected_targets_by_value"),
    [
        ("item.brand", [0, 2, 1, 3], {"red": [0, 1], "(other)": [3], "blue": [2]}),
        ("item.tags", [0, 1, 3], {"blue": [0, 1], "red": [0]}),
        ("user.age", [0, 2, 1], {"[30, inf)": [1, 2], "[-inf, 30)": [0]}),
        ("user.joined", [0, 2, 1], {"[1000001, 1000002)": [1, 2], "[1000000, 1000001)": [0]}),
        ("context.hash", [2, 4, 7], {"(hash 2)": [0, 1], "(hash 1)": [2]}),
    ],
)
def test_a_slice_has_the_targets_whose_owners_have_its_value(
    name: str, owner_rows: list[int], expected_targets_by_value: dict[str, list[int]], features: FeaturesManifest
) -> None:
    mask_by_slice = feature_slices(FeatureSlice(feature=name), features, owner_T=np.array(owner_rows))
    assert {slice_name: np.flatnonzero(mask).tolist() for slice_name, mask in mask_by_slice.items()} == {
        f"{name}={value}": targets for value, targets in expected_targets_by_value.items()
    }


def test_a_value_with_the_name_other_is_in_the_slice_of_all_other_values(features: FeaturesManifest) -> None:
    pq.write_table(pa.table({"value": [None, "(other)", "blue"]}), features.folder / "item.brand.vocabulary.parquet")
    mask_by_slice = feature_slices(FeatureSlice(feature="item.brand"), features, owner_T=np.array([0, 2, 1, 3]))
    assert {name: np.flatnonzero(mask).tolist() for name, mask in mask_by_slice.items()} == {
        "item.brand=(other)": [0, 1, 3],
        "item.brand=blue": [2],
    }


def test_only_the_most_frequent_values_are_slices(features: FeaturesManifest) -> None:
    mask_by_slice = feature_slices(FeatureSlice(feature="item.brand", max_values=1), features, owner_T=np.array([0, 2, 1]))
    assert list(mask_by_slice) == ["item.brand=red"]


@pytest.mark.parametrize(
    ("name", "message"), [("item.color", r"item.color is not declared .*item\.brand"), ("item.price", "standardised")]
)
def test_a_feature_that_is_not_declared_or_has_no_buckets_is_rejected(
    name: str, message: str, features: FeaturesManifest
) -> None:
    with pytest.raises(InputError, match=message):
        feature_slices(FeatureSlice(feature=name), features, owner_T=np.array([0]))


def test_a_slice_is_rejected_if_no_feature_is_declared() -> None:
    with pytest.raises(InputError, match="declared: none"):
        feature_slices(FeatureSlice(feature="user.age"), None, owner_T=np.array([0]))


def write_small_log(folder: Path) -> InteractionsManifest:
    """Write the events of three users with four items. The test events have the indices 2, 4, 5 and 7 in the log."""
    train, test = [[0, 1], [0], [3]], [[2], [1, 3], [0]]
    return write_interactions_stage(folder, train=train, validation=[[], [], []], test=test, num_items=4)


def test_guarded_slices_are_built_from_the_rows_of_the_sampled_users(tmp_path: Path, features: FeaturesManifest) -> None:
    mask_by_slice, min_users_by_slice = guarded_slices(
        [FeatureSlice(feature=name, min_users=7) for name in ("user.age", "context.hash", "item.brand")],
        features,
        store=EventStore.open(write_small_log(tmp_path / "interactions")),
        user_row_U=np.array([2, 1]),
        user_T=np.array([0, 1, 1]),
        item_T=np.array([0, 1, 3]),
    )
    assert {name: np.flatnonzero(mask).tolist() for name, mask in mask_by_slice.items()} == {
        "user.age=[30, inf)": [0, 1, 2],
        "context.hash=(hash 2)": [1, 2],
        "context.hash=(hash 1)": [0],
        "item.brand=red": [0],
        "item.brand=blue": [1],
        "item.brand=(other)": [2],
    }
    assert min_users_by_slice == dict.fromkeys(mask_by_slice, 7)


def test_a_guarded_feature_without_a_value_among_the_targets_has_one_empty_slice(
    tmp_path: Path, features: FeaturesManifest
) -> None:
    store = EventStore.open(write_small_log(tmp_path / "interactions"))
    targets = {"user_row_U": np.array([1]), "user_T": np.array([0]), "item_T": np.array([3])}
    mask_by_slice, min_users_by_slice = guarded_slices(
        [FeatureSlice(feature="item.tags", min_users=7)], features, store=store, **targets
    )
    assert {name: mask.tolist() for name, mask in mask_by_slice.items()} == {"item.tags": [False]}
    assert min_users_by_slice == {"item.tags": 7}


def _evaluate(folder: Path, config: EvaluationConfig, features: FeaturesManifest) -> EvaluationManifest:
    """Evaluate a model for three users. Their scores of the four items are the rows of `query_BD`."""
    interactions = write_small_log(folder / "interactions")
    query_BD = np.array([[0, 0, 1, 0], [0, 2, 0, 1], [0, 0, 0, 1.0]])
    return evaluate(
        config,
        export=write_export_stage(folder / "export", item_vectors=np.eye(4), queries={"test": ([0, 1, 2], query_BD)}),
        dataset=Dataset(interactions, None, features),
        folder=folder / "evaluation",
    )


def test_the_evaluation_reports_slices_of_items_users_and_context(tmp_path: Path, features: FeaturesManifest) -> None:
    slices = tuple(FeatureSlice(feature=name, min_users=1) for name in ("item.brand", "user.age", "context.hash"))
    report_by_name = {
        report.name: report for report in _evaluate(tmp_path, EvaluationConfig(ks=(1,), slices=slices), features).slices
    }
    # The items of the three users, with the test items after a bar: 0 1 | 2, 0 | 1 3, 3 | 0.
    num_users_and_targets = {
        name: (report.num_users, report.num_targets) for name, report in report_by_name.items() if "=" in name
    }
    assert num_users_and_targets == {
        "item.brand=red": (2, 2), "item.brand=(other)": (1, 1), "item.brand=blue": (1, 1),
        "user.age=[30, inf)": (2, 3), "user.age=[-inf, 30)": (1, 1),
        "context.hash=(hash 2)": (2, 3), "context.hash=(hash 1)": (1, 1),
    }  # fmt: skip
    assert {name: report_by_name[f"{name} users"].num_users for name in ("new", "light", "heavy")} == {
        "new": 0,
        "light": 2,
        "heavy": 1,
    }
    assert report_by_name["item.brand=blue"].metrics["recall@1"] == 1  # user 1 has item 1 in first place
    assert report_by_name["context.hash=(hash 2)"].metrics["recall@1"] == pytest.approx((1 + 1 / 2) / 2)


def test_a_slice_with_too_few_users_has_no_metrics(tmp_path: Path, features: FeaturesManifest) -> None:
    config = EvaluationConfig(ks=(1,), slices=(FeatureSlice(feature="user.age", min_users=2),), min_slice_users=4)
    manifest = _evaluate(tmp_path, config, features)
    assert {report.name: bool(report.metrics) for report in manifest.slices if report.num_users > 1} == {
        "warm items": False, "known users": False, "light users": False,
        "user.age=[30, inf)": True,
    }  # fmt: skip
    assert "test/slice/warm_items/recall@1" not in manifest.metrics
    assert manifest.metrics["test/slice/warm_items/users"] == 2


def test_a_feature_with_two_entries_is_rejected() -> None:
    brand = FeatureSlice(feature="item.brand")
    with pytest.raises(ValidationError, match=r"2 entries have the feature item\.brand; keep one of them"):
        EvaluationConfig(slices=(brand, FeatureSlice(feature="user.age"), brand.model_copy(update={"max_values": 3})))
