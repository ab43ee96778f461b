"""The evaluation stage, with metrics that are counted by hand on a small log."""

import math
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch.nn.functional import normalize

from recsys_core.errors import InputError
from recsys_core.evaluation import diversity, held_out, slices
from recsys_core.evaluation import metrics as metrics_module
from recsys_core.evaluation.config import ClosedFormConfig, EvaluationConfig
from recsys_core.evaluation.evaluate import evaluate
from recsys_core.manifests import Dataset, EvaluationManifest, ExportManifest
from recsys_core.models.config import TwoTowerConfig
from recsys_core.models.spec import ModelSpec
from tests.recsys_core.evaluation.stage_folders import write_embeddings_stage, write_export_stage, write_interactions_stage

BEAUTY = Path(__file__).resolve().parents[4] / "shared" / "data" / "beauty"

# Item rows of four users. User 3 is new, and the items 3, 4 and 5 are cold. User 2 had test item 0 already in training.
TRAIN = [[0, 1], [0, 2], [0], []]
VALIDATION = [[2], [1], [], [0]]
TEST = [[3], [3, 5], [4, 0], [1]]
ITEM_VECTORS = np.eye(6)
QUERY_VECTORS = np.array([[0, 0, 0, 9, 1, 0], [0, 0, 0, 1, 2, 3], [0, 5, 4, 3, 2, 1], [0, 1, 0, 0, 0, 2]], float)


def _evaluate(
    folder: Path,
    config: EvaluationConfig,
    *,
    has_embeddings: bool = False,
    validation: list[list[int]] = VALIDATION,
    test: list[list[int]] = TEST,
    arrays: Mapping[str, np.ndarray] = MappingProxyType({}),
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> EvaluationManifest:
    """Write the stages of the small log and evaluate them. has_embeddings: whether items 0 to 3 have pretrained vectors."""
    test_users = [user for user, rows in enumerate(test) if rows]
    return evaluate(
        config,
        export=write_export_stage(
            folder / "export",
            item_vectors=ITEM_VECTORS,
            queries={"test": (test_users, QUERY_VECTORS[test_users]), "validation": ([0, 1, 3], QUERY_VECTORS[[0, 1, 3]])},
        ),
        dataset=Dataset(
            write_interactions_stage(
                folder / "interactions",
                train=TRAIN,
                validation=validation,
                test=test,
                num_items=6,
                vector_row=[0, 1, 2, 3, -1, -1],
                arrays=arrays,
            ),
            write_embeddings_stage(folder / "embeddings", np.eye(4)) if has_embeddings else None,
        ),
        folder=folder / "evaluation",
        on_progress=on_progress,
    )


def test_metrics_of_a_small_log_equal_a_count_by_hand(tmp_path: Path) -> None:
    metrics = _evaluate(tmp_path, EvaluationConfig(ks=(1, 2), min_slice_users=1)).metrics
    # The best unseen items are 3 for user 0; 5, 4, 3 for user 1; 1, 2, 3, 4 for user 2; and 5, 1 for user 3.
    assert metrics["test/users"] == 4
    assert metrics["test/targets"] == 5
    assert metrics["test/seen_targets"] == 1
    assert metrics["test/recall@1"] == pytest.approx((1 + 1 / 2 + 0 + 0) / 4)
    assert metrics["test/hit_rate@2"] == pytest.approx(3 / 4)
    assert metrics["test/mrr"] == pytest.approx((1 + 1 + 1 / 4 + 1 / 2) / 4)
    assert metrics["test/coverage@1"] == pytest.approx(3 / 6)  # items 3, 5 and 1
    assert metrics["test/slice/cold_items/targets"] == 4  # items 3, 4 and 5 are in no training event
    assert metrics["test/slice/cold_items/recall@1"] == pytest.approx((1 + 1 / 2 + 0) / 3)
    assert metrics["test/slice/warm_items/targets"] == 1
    assert metrics["test/slice/new_users/recall@2"] == 1
    assert metrics["test/slice/known_users/targets"] == 4


def test_known_negatives_are_counted_before_the_split_and_without_items_of_the_history(tmp_path: Path) -> None:
    # Each user has three lists: the known negatives of training, validation and test. Users 1 and 3 have a negative in training
    # that is also their validation item.
    negatives_by_split_of_users = [[4], [], [3], [1], [5], [], [], [], [], [0], [], [5]]
    arrays = {
        "negative_offset": np.cumsum([0, *map(len, negatives_by_split_of_users)]),
        "negative_item": np.concatenate(negatives_by_split_of_users).astype(np.int32),
    }
    manifest = _evaluate(tmp_path, EvaluationConfig(ks=(1, 2)), arrays=arrays)
    # User 0 has 3 and 4 in the first two places, user 1 has 5 and 4. Users 2 and 3 have no known negative before the test.
    assert manifest.metrics["test/known_negatives@1"] == (0 + 1) / 2
    assert manifest.metrics["test/known_negatives@2"] == (1 / 2 + 1 / 2) / 2
    assert manifest.half_widths["test/known_negatives@2"] == 0
    # In validation, user 0 has 3 and 4; user 1 has 5 and 4, and the known negative 1; user 3 is new and has 0 and 1, the most
    # popular items.
    assert manifest.metrics["validation/known_negatives@2"] == pytest.approx((1 / 2 + 0 + 1 / 2) / 3)
    # By popularity, users 0 and 1 have 3 and 4 in the first two places: items without an event are in the order of their ids.
    assert manifest.metrics["baseline/popularity/known_negatives@2"] == (1 / 2 + 0) / 2
    assert not [name for name in _evaluate(tmp_path / "none", EvaluationConfig()).metrics if "known_negatives" in name]


def test_cold_items_are_ranked_among_cold_items_for_users_with_a_cold_target(tmp_path: Path) -> None:
    metrics = _evaluate(tmp_path, EvaluationConfig(ks=(1, 2)), has_embeddings=True).metrics
    # Items 3, 4 and 5 have no event before the test. User 0 ranks 3 first, user 1 ranks 5, 4, 3, and user 2 ranks 3, 4, 5.
    assert (metrics["test/cold/users"], metrics["test/cold/items"]) == (3, 3)
    assert metrics["test/cold/recall@1"] == pytest.approx((1 + 1 / 2 + 0) / 3)
    assert metrics["test/cold/recall@2"] == pytest.approx((1 + 1 / 2 + 1) / 3)
    assert metrics["test/cold/hit_rate@1"] == pytest.approx(2 / 3)
    # The second position has the weight 1 / log2(3) = log(2, 3).
    assert metrics["test/cold/ndcg@2"] == pytest.approx((1 + 1 / (1 + math.log(2, 3)) + math.log(2, 3)) / 3)
    # Zero-shot ranks item 3 first, because it is the only cold item with a vector.
    assert metrics["baseline/zero_shot/cold/recall@1"] == pytest.approx((1 + 1 / 2 + 0) / 3)
    assert metrics["baseline/zero_shot/cold/users"] == 3
    assert metrics.keys() >= {"baseline/zero_shot/recall@1", "baseline/zero_shot/ndcg@2"}
    # All validation items occur in training.
    assert not [name for name in metrics if name.startswith(("validation/cold", "baseline/popularity/cold"))]


def test_an_item_without_a_training_event_is_cold_in_validation(tmp_path: Path) -> None:
    validation = [[4], [1], [], [0]]
    metrics = _evaluate(tmp_path, EvaluationConfig(ks=(1,)), validation=validation).metrics
    # Only items 0, 1 and 2 have training events. User 0 ranks the cold items 3, 4, 5.
    assert (metrics["validation/cold/users"], metrics["validation/cold/items"]) == (1, 3)
    assert metrics["validation/cold/recall@1"] == 0
    assert metrics["test/cold/items"] == 2  # item 4 has a validation event


def test_without_a_cold_target_there_are_no_cold_metrics(tmp_path: Path) -> None:
    metrics = _evaluate(tmp_path, EvaluationConfig(ks=(1,)), has_embeddings=True, test=[[2, 0], [], [1], [1]]).metrics
    assert not [name for name in metrics if "/cold/" in name]


def test_cold_metrics_have_only_cut_offs_below_the_number_of_cold_items(tmp_path: Path) -> None:
    metrics = _evaluate(tmp_path, EvaluationConfig(ks=(2, 3, 10)), has_embeddings=True).metrics
    assert metrics["test/cold/items"] == 3
    cut_offs = {name.partition("@")[2] for name in metrics if "/cold/" in name and "@" in name}
    assert cut_offs == {"2"}


@pytest.mark.parametrize("reads_users", [False, True])
def test_unknown_users_are_ranked_by_popularity_as_they_are_served(reads_users: bool, tmp_path: Path) -> None:
    # User 1 has no event before the test. Its query vector puts item 3 first, and popularity puts it last.
    spec = ModelSpec.sized(TwoTowerConfig(learn_user_embedding=reads_users), num_users=2, num_items=4)
    manifest = evaluate(
        EvaluationConfig(ks=(1, 3), min_slice_users=1),
        export=write_export_stage(
            tmp_path / "export", item_vectors=np.eye(4), queries={"test": ([0, 1], np.eye(4)[[3, 3]])}, spec=spec
        ),
        dataset=Dataset(
            write_interactions_stage(
                tmp_path / "interactions", train=[[0, 0, 1], []], validation=[[2], []], test=[[3], [3]], num_items=4
            )
        ),
        folder=tmp_path / "evaluation",
    )
    assert manifest.metrics["test/slice/known_users/recall@1"] == 1
    assert manifest.metrics["test/slice/new_users/recall@1"] == (1 if reads_users else 0)
    assert manifest.metrics["test/coverage@1"] == (1 / 4 if reads_users else 2 / 4)
    assert manifest.metrics["test/mrr"] == (1 if reads_users else pytest.approx((1 + 1 / 4) / 2))


def test_progress_ends_with_all_queries(tmp_path: Path) -> None:
    progress: list[tuple[int, int]] = []
    _evaluate(
        tmp_path, EvaluationConfig(ks=(1,)), has_embeddings=True, on_progress=lambda done, total: progress.append((done, total))
    )
    num_queries = 3 + 4 * 4  # 3 in the validation; in the test, 4 for each of the model and three baselines
    assert progress[-1] == (num_queries, num_queries)
    assert [done for done, _ in progress] == sorted(done for done, _ in progress)


def test_popularity_counts_the_events_before_the_test_and_is_saved(tmp_path: Path) -> None:
    manifest = _evaluate(tmp_path, EvaluationConfig(ks=(2,)))
    # Before the test, item 0 has four events, items 1 and 2 have two each, and the other items have none.
    assert np.load(manifest.path("popularity.npy")).tolist() == [0, 1, 2, 3, 4, 5]
    # User 3 has seen item 0, so that its target, item 1, comes first.
    assert manifest.metrics["baseline/popularity/recall@2"] == pytest.approx((1 + 1 / 2 + 0 + 1) / 4)
    assert "baseline/zero_shot/recall@2" not in manifest.metrics


def test_seen_items_are_ranked_and_counted_when_they_are_not_excluded(tmp_path: Path) -> None:
    metrics = _evaluate(tmp_path, EvaluationConfig(ks=(1,), exclude_seen=False)).metrics
    assert metrics["test/targets"] == 6
    assert metrics["test/seen_targets"] == 0


def test_a_sample_of_users_is_the_same_every_time(tmp_path: Path) -> None:
    metrics, repeated_metrics = (_evaluate(tmp_path / name, EvaluationConfig(ks=(1,), max_users=2)).metrics for name in "ab")
    assert metrics == repeated_metrics
    assert metrics["test/users"] == 2


def test_without_auc_only_the_metrics_of_the_full_ranking_are_missing(tmp_path: Path) -> None:
    all_metrics = _evaluate(tmp_path / "all", EvaluationConfig(ks=(1, 2)), has_embeddings=True).metrics
    metric_names = ("recall", "ndcg", "precision", "hit_rate", "map", "mrr")
    metrics = _evaluate(tmp_path / "top", EvaluationConfig(ks=(1, 2), metrics=metric_names), has_embeddings=True).metrics
    baseline_prefixes = [f"baseline/{name}" for name in ("popularity", "cooccurrence", "closed_form", "zero_shot")]
    assert {*all_metrics} - {*metrics} == {
        f"{prefix}/{name}" for prefix in ("validation", "test", *baseline_prefixes) for name in ("auc", "gauc", "mrr")
    }
    assert metrics == {name: all_metrics[name] for name in metrics}


def test_the_positions_of_the_targets_are_saved_for_each_ranker(tmp_path: Path) -> None:
    manifest = _evaluate(tmp_path, EvaluationConfig(ks=(2,)), has_embeddings=True)
    positions = metrics_module.read_positions(manifest.path("positions.parquet"))
    assert list(positions) == ["model", "popularity", "cooccurrence", "closed_form", "zero_shot"]
    for ranker, targets in positions.items():
        prefix = "test" if ranker == "model" else f"baseline/{ranker}"
        assert metrics_module.auc(targets).mean() == pytest.approx(manifest.metrics[f"{prefix}/auc"])
        assert metrics_module.recall(targets, k=2).mean() == pytest.approx(manifest.metrics[f"{prefix}/recall@2"])
        assert targets.original_user_U.tolist() == [0, 1, 2, 3]


@pytest.fixture(scope="module")
def random_stages(tmp_path_factory: pytest.TempPathFactory) -> tuple[ExportManifest, Dataset]:
    """An export and a log of 300 users and 60 items, with new users and cold items."""
    random, folder = np.random.default_rng(0), tmp_path_factory.mktemp("random")
    train, validation, test = (
        [random.choice(num_items, length, replace=False).tolist() for length in random.integers(0, max_length, 300)]
        for num_items, max_length in ((50, 40), (60, 3), (60, 4))
    )
    users_by_split = {split: np.flatnonzero([*map(len, rows)]) for split, rows in (("validation", validation), ("test", test))}
    export = write_export_stage(
        folder / "export",
        item_vectors=random.normal(size=(60, 5)),
        queries={split: (users, random.normal(size=(len(users), 5))) for split, users in users_by_split.items()},
    )
    negatives_by_split_of_users = [random.choice(60, length).tolist() for length in random.integers(0, 3, 900)]
    interactions = write_interactions_stage(
        folder / "interactions",
        train=train,
        validation=validation,
        test=test,
        num_items=60,
        vector_row=[*range(40), *[-1] * 20],
        arrays={
            "negative_offset": np.cumsum([0, *map(len, negatives_by_split_of_users)]),
            "negative_item": np.concatenate(negatives_by_split_of_users).astype(np.int32),
        },
    )
    return export, Dataset(interactions, write_embeddings_stage(folder / "embeddings", random.normal(size=(40, 4))))


@pytest.mark.parametrize("exclude_seen", [True, False])
def test_chunks_of_users_change_no_result_and_need_less_memory(
    exclude_seen: bool, random_stages: tuple[ExportManifest, Dataset], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export, dataset = random_stages
    monkeypatch.setattr(diversity, "CHUNK_QUERIES", 3)  # so that the diversity needs little memory
    config = EvaluationConfig(ks=(1, 5), min_slice_users=1, exclude_seen=exclude_seen)
    manifests, peak_bytes = [], []
    for chunk_users in (1_000, 31, 31):
        for module in (held_out, slices):
            monkeypatch.setattr(module, "CHUNK_USERS", chunk_users)
        tracemalloc.start()
        folder = tmp_path / str(len(manifests))
        manifests.append(evaluate(config, export=export, dataset=dataset, folder=folder))
        peak_bytes.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    for manifest in manifests[1:]:
        assert (manifest.metrics, manifest.half_widths) == (manifests[0].metrics, manifests[0].half_widths)
        assert manifest.slices == manifests[0].slices
        assert manifest.files == manifests[0].files
    assert {*manifests[0].files} == {"metrics.json", "popularity.npy", "positions.parquet", "user_metrics.parquet"}
    assert min(peak_bytes[1:]) < peak_bytes[0]  # a thread of an earlier test may add to one of the peaks


def test_linear_baselines_are_left_out_if_the_catalogue_is_above_the_limit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = EvaluationConfig(ks=(1,), closed_form=ClosedFormConfig(max_items=5))
    with caplog.at_level("INFO"):
        metrics = _evaluate(tmp_path, config).metrics
    assert {name.split("/")[1] for name in metrics if name.startswith("baseline/")} == {"popularity"}
    assert (
        "cooccurrence and closed_form are left out: the catalogue has 6 items, but evaluation.closed_form.max_items is 5"
        in caplog.text
    )


def test_metrics_have_intervals_over_the_sampled_users(tmp_path: Path) -> None:
    half_widths = _evaluate(tmp_path, EvaluationConfig(ks=(1,), max_users=3)).half_widths
    assert half_widths["test/recall@1"] > 0 and half_widths["baseline/popularity/recall@1"] >= 0
    assert "test/coverage@1" not in half_widths


def test_a_log_without_test_events_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the test split has no event"):
        _evaluate(tmp_path, EvaluationConfig(), test=[[], [], [], []])
    assert not (tmp_path / "evaluation").exists()


@pytest.mark.skipif(not BEAUTY.is_dir(), reason="the public Beauty data is not on this machine")
def test_popularity_on_beauty_has_the_published_metrics(tmp_path: Path) -> None:
    log = pq.read_table(BEAUTY / "interactions.parquet").sort_by([("user_id", "ascending"), ("position", "ascending")])
    item_ids, item_row_E = np.unique(log["item_id"].to_numpy(), return_inverse=True)
    items_of_users = np.split(item_row_E, np.flatnonzero(np.diff(log["user_id"].to_numpy())) + 1)
    interactions = write_interactions_stage(
        tmp_path / "interactions",
        train=[rows[:-2] for rows in items_of_users],
        validation=[rows[-2:-1] for rows in items_of_users],
        test=[rows[-1:] for rows in items_of_users],
        num_items=len(item_ids),
        item_ids=item_ids.tolist(),
    )
    users = np.arange(len(items_of_users))
    vectors = normalize(torch.randn((len(item_ids), 4), generator=torch.Generator().manual_seed(0)), dim=1).numpy()
    export = write_export_stage(
        tmp_path / "export",
        item_vectors=vectors,
        queries={"test": (users, vectors[users % len(item_ids)])},
    )
    metrics = evaluate(
        EvaluationConfig(ks=(10,), baselines=()), export=export, dataset=Dataset(interactions), folder=tmp_path / "evaluation"
    ).metrics
    assert round(metrics["baseline/popularity/hit_rate@10"], 4) == 0.0135
    assert round(metrics["baseline/popularity/ndcg@10"], 4) == 0.0061
