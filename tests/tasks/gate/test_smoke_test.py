"""The smoke test: its sample of users, its metrics compared with values computed by hand, and invalid answers."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys_core.dataset.feature_store import Feature, FeatureStore
from recsys_core.errors import StageError
from recsys_core.evaluation.config import FeatureSlice
from recsys_core.manifests import IngestedFeature
from tasks.gate import smoke_test
from tasks.gate.sample import Answers, K, UserSample, answer_problems, measure_answers, prepare_sample
from tasks.gate.smoke_test import ModelProcess, UnusableVersionError, read_answers
from tests.recsys_core.evaluation.stage_folders import write_features_stage, write_interactions_stage

NUM_ITEMS = 30


@pytest.fixture
def sample(tmp_path: Path) -> UserSample:
    """A sample of three users. Item row r has the id 100 + r.

    The second user has no test event. The only test item of the third user is already in its history.
    """
    interactions = write_interactions_stage(
        tmp_path / "interactions",
        train=[[0, 1], [2], [3]],
        validation=[[2], [], []],
        test=[[4, 5, 4], [], [3]],
        num_items=NUM_ITEMS,
        item_ids=list(range(100, 100 + NUM_ITEMS)),
        user_ids=[7, 8, 9],
    )
    return prepare_sample(interactions, max_users=10, folder=tmp_path / "sample")


def answers(items_of_first_user: list[int], items_of_second_user: list[int]) -> Answers:
    """Return the answers to the two users of the sample."""
    return Answers(pa.array([items_of_first_user, items_of_second_user], type=pa.list_(pa.int64())), cpu_s=3.0, num_bytes=10)


def test_the_sample_holds_users_with_test_events_and_their_items_before_the_test(sample: UserSample) -> None:
    assert pq.read_table(sample.histories_file).to_pydict() == {"user_id": [7, 9], "history": [[100, 101, 102], [103]]}


def test_metrics_count_each_target_once_and_leave_out_items_of_the_history(sample: UserSample) -> None:
    metrics = measure_answers(answers([110, 104, *range(111, 129)], [*range(105, 125)]), sample=sample).user_metrics.means(
        "served"
    )
    # Of the targets 104 and 105, only 104 is in the list, at position 2. Its gain is 1/log2(3) = 0.63, and both targets at the
    # first positions would have the gain 1 + 1/log2(3).
    expected_metrics = {"served/recall@20": 0.5, "served/hit_rate@10": 1.0, "served/ndcg@20": 0.6309298 / 1.6309298}
    assert metrics == pytest.approx(expected_metrics)


def test_a_target_at_position_11_does_not_count_for_hit_rate_at_10(sample: UserSample) -> None:
    metrics = measure_answers(answers([*range(110, 120), 105], []), sample=sample).user_metrics.means("served")
    assert (metrics["served/hit_rate@10"], metrics["served/recall@20"]) == (0.0, 0.5)


def test_items_of_another_catalogue_are_left_out_of_the_lists_and_counted(sample: UserSample) -> None:
    known_item_ids = [*range(110, 120), 105]
    metrics = measure_answers(answers([-1, *known_item_ids], []), sample=sample)
    assert (metrics.num_recommended, metrics.num_unknown) == (12, 1)
    metrics_of_known_items = measure_answers(answers(known_item_ids, []), sample=sample)
    assert metrics.user_metrics.means("served") == metrics_of_known_items.user_metrics.means("served")
    assert (metrics.coverage, metrics_of_known_items.num_unknown) == (metrics_of_known_items.coverage, 0)
    # Without the unknown item 999, the target 105 moves from position 11 to position 10.
    metrics_of_moved_target = measure_answers(answers([999, *range(110, 119), 105], []), sample=sample)
    assert metrics_of_moved_target.user_metrics.means("served")["served/hit_rate@10"] == 1


def test_valid_answers_have_no_problems(sample: UserSample) -> None:
    assert answer_problems(answers(list(range(103, 123)), list(range(104, 124))), sample=sample) == []


@pytest.mark.parametrize(
    ("items_of_first_user", "problem"),
    [
        ([-1, *range(104, 123)], "1 items that are not in the catalogue"),
        ([100 + NUM_ITEMS, *range(104, 123)], "1 items that are not in the catalogue"),
        ([101, 102, *range(104, 122)], "2 items that the user had before"),
        ([104, *range(104, 123)], "1 items that are recommended twice to one user"),
        (list(range(104, 114)), "1 users whose number of items is not min(20, number of unseen items)"),
    ],
)
def test_each_problem_of_an_answer_is_reported_with_its_count(
    sample: UserSample, items_of_first_user: list[int], problem: str
) -> None:
    valid_items = list(range(104, 104 + K))
    assert answer_problems(answers(items_of_first_user, valid_items), sample=sample) == [f"{problem} (of 2 users)"]


@pytest.mark.parametrize(
    ("answer_table", "problem"),
    [
        (None, r"its process ended without a readable file of answers with the column item_ids \(FileNotFoundError\)"),
        (
            pa.table({"ids": [[100], [101]]}),
            r"its process ended without a readable file of answers with the column item_ids \(KeyError\)",
        ),
        (pa.table({"item_ids": [[100]]}), "2 users, but 1 answers"),
        (pa.table({"item_ids": [[100], [101], [102]]}), "2 users, but 3 answers"),
        (pa.table({"item_ids": [100, 101]}), "the answers have the type int64, but lists of int64 are expected"),
        (pa.table({"item_ids": [["100"], ["101"]]}), "but lists of int64 are expected"),
        (pa.table({"item_ids": [[100], None]}), "1 of 2 users have no answer"),
    ],
)
def test_a_version_without_one_list_of_ids_per_user_is_unusable(
    sample: UserSample, tmp_path: Path, answer_table: pa.Table | None, problem: str
) -> None:
    if answer_table is not None:
        pq.write_table(answer_table, tmp_path / "answers.parquet")
    with pytest.raises(UnusableVersionError, match=f"^models:/m/1: .*{problem}"):
        read_answers(tmp_path / "answers.parquet", sample=sample, model_uri="models:/m/1")


def test_a_version_that_writes_no_parquet_file_is_unusable(sample: UserSample, tmp_path: Path) -> None:
    (tmp_path / "answers.parquet").write_bytes(b"PAR1")
    with pytest.raises(UnusableVersionError, match="without a readable file of answers with the column item_ids"):
        read_answers(tmp_path / "answers.parquet", sample=sample, model_uri="models:/m/1")


@pytest.mark.parametrize(("test_items", "num_users"), [([], 0), ([0], 2)], ids=["no test items", "only items of the histories"])
def test_a_log_whose_test_items_are_all_in_the_histories_stops_the_stage(
    test_items: list[int], num_users: int, tmp_path: Path
) -> None:
    interactions = write_interactions_stage(
        tmp_path / "interactions", train=[[0], [0]], validation=[[], []], test=[test_items, test_items], num_items=3
    )
    with pytest.raises(
        StageError, match=f"none of {num_users} test users has a test item that is not in .*; choose another test"
    ):
        prepare_sample(interactions, max_users=5, folder=tmp_path / "sample")


def test_the_slices_of_users_depend_on_training_events_alone(tmp_path: Path) -> None:
    interactions = write_interactions_stage(
        tmp_path / "interactions",
        train=[[0], [], [3, 3, 3]],
        validation=[[1], [2], []],
        test=[[4], [5], [6]],
        num_items=NUM_ITEMS,
    )
    sample = prepare_sample(interactions, max_users=10, folder=tmp_path / "sample")
    users_by_slice = {name: np.flatnonzero(mask_T).tolist() for name, mask_T in sample.target_mask_by_slice.items()}
    assert {name: users_by_slice[name] for name in ("new users", "light users", "heavy users")} == {
        "new users": [1],
        "light users": [0],
        "heavy users": [2],
    }


def test_the_sample_has_the_context_of_the_first_test_events_even_without_the_manifest_of_the_features(tmp_path: Path) -> None:
    interactions = write_interactions_stage(
        tmp_path / "interactions",
        train=[[0, 1], [0]],
        validation=[[]] * 2,
        test=[[2, 3], [3]],
        num_items=4,
        context=pa.table({"device": ["a", "a", "b", "c", "a", "d"], "user_id": [1, 2, 3, 4, 5, 6]}),
    )
    sample = prepare_sample(interactions, max_users=2, folder=tmp_path / "sample")  # as in nightjar promote
    context = {name: values.to_pylist() for name, values in sample.context.items()}
    assert context == {"context.device": ["b", "d"], "device": ["b", "d"], "context.user_id": [3, 6]}
    assert set(pq.read_schema(sample.histories_file).names) == {"user_id", "history", *context}


def test_the_sample_has_slices_by_features_of_users_items_and_events(tmp_path: Path) -> None:
    # Targets are test items that are not in the user's history: 2 for user 0, 1 and 3 for user 1, and 0 for user 2.
    interactions = write_interactions_stage(
        tmp_path / "interactions",
        train=[[0, 1], [0], [3]],
        validation=[[]] * 3,
        test=[[2, 2], [0, 1, 3], [0]],
        num_items=4,
        context=pa.table({"hour": [7.0, 7.0, 8.0, 7.0, 7.0, 7.0, 8.0, 7.0, 7.0, float("nan")]}),
    )
    rows_by_feature = {"user.age": [1, 2, 2], "item.brand": [1, 2, 1, 0], "context.hour": [1, 1, 2, 1, 1, 1, 2, 1, 1, 2]}
    columns = {key: Feature(np.array(rows, np.int32), None, None) for key, rows in rows_by_feature.items()}
    columns["item.tags"] = Feature(np.zeros(0, np.int32), np.zeros(5, np.int64), None)
    zero_counts = dict.fromkeys(("num_values", "num_out_of_vocabulary", "num_missing"), 0)
    ingested_by_feature = {
        key: IngestedFeature(
            kind="list" if key == "item.tags" else "categorical", num_rows=3, definition="", is_continued=False, **zero_counts
        )
        for key in columns
    }
    sample = prepare_sample(
        interactions,
        max_users=3,
        folder=tmp_path / "sample",
        features=write_features_stage(tmp_path / "features", FeatureStore(columns), ingested_by_feature=ingested_by_feature),
        feature_slices=[FeatureSlice(feature=key, min_users=7 if key == "user.age" else None) for key in columns],
    )
    assert (sample.target_pair_T % 4).tolist() == [2, 1, 3, 0]
    query_columns = pq.read_table(sample.histories_file).to_pydict()
    assert query_columns["hour"] == query_columns["context.hour"] == [8, 7, None]  # the hour of each user's first test event
    targets_by_slice = {
        name: np.flatnonzero(mask_T).tolist() for name, mask_T in sample.target_mask_by_slice.items() if "." in name
    }
    assert targets_by_slice == {
        "user.age=(hash 1)": [0],
        "user.age=(hash 2)": [1, 2, 3],
        "item.brand=(hash 1)": [0, 3],
        "item.brand=(hash 2)": [1],
        "item.brand=(other)": [2],
        "context.hour=(hash 2)": [0, 1, 3],
        "context.hour=(hash 1)": [2],
        "item.tags": [],  # no item has a value, but the slice is still reported
    }
    assert {name: sample.min_users_by_slice[name] for name in ("user.age=(hash 1)", "item.tags")} == {
        "user.age=(hash 1)": 7,
        "item.tags": None,
    }


def test_the_sample_is_reproducible(tmp_path: Path) -> None:
    interactions = write_interactions_stage(
        tmp_path / "interactions", train=[[0]] * 50, validation=[[]] * 50, test=[[1]] * 50, num_items=3
    )
    sample, repeated_sample = (prepare_sample(interactions, max_users=5, folder=tmp_path / name) for name in ("a", "b"))
    assert sample.num_users == 5
    assert pq.read_table(sample.histories_file).equals(pq.read_table(repeated_sample.histories_file))


def test_a_model_process_survives_a_failed_request_and_is_replaced_after_a_timeout_or_kill(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = ModelProcess._start

    def start_and_kill(process: ModelProcess) -> Any:
        child = start(process)
        child.kill()
        child.wait()
        patch.setattr(child, "poll", lambda: None)  # as if the child had ended after the check that it is running
        return child

    with ModelProcess() as process:
        assert process.answer({}) == (1, "KeyError: 'input_path'")
        os.kill(process._process.pid, signal.SIGSTOP)
        with monkeypatch.context() as patch, pytest.raises(TimeoutError):
            patch.setattr(smoke_test, "_TIMEOUT_S", 0.1)
            process.answer({})
        with monkeypatch.context() as patch:
            patch.setattr(ModelProcess, "_start", start_and_kill)
            assert process.answer({}) == (-signal.SIGKILL, "no message")
        assert process.answer({"input_path": "absent.parquet"}) == (1, "FileNotFoundError: absent.parquet")


HANGING_MODEL = """
import os, pathlib, time

def _load_pyfunc(path):
    pathlib.Path(path, "pids.tmp").write_text(f"{os.getpid()} {os.getppid()}")
    os.rename(pathlib.Path(path, "pids.tmp"), pathlib.Path(path, "pids"))
    time.sleep(600)
"""


def test_a_model_that_hangs_is_ended_with_a_killed_run(sample: UserSample, tmp_path: Path) -> None:
    (tmp_path / "hanging_model.py").write_text(HANGING_MODEL)
    (tmp_path / "MLmodel").write_text("flavors: {python_function: {loader_module: hanging_model, data: .}}")
    request = {"model_folder": str(tmp_path), "model_config": {}, "input_path": str(sample.histories_file)}
    command = [sys.executable, "-c", f"from tasks.gate.smoke_test import ModelProcess; ModelProcess().answer({request})"]
    run = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": f"{Path(__file__).parents[3]}:{tmp_path}"})
    pids_file = tmp_path / "pids"
    deadline_s = time.monotonic() + 60
    while not pids_file.exists() and run.poll() is None and time.monotonic() < deadline_s:
        time.sleep(0.05)
    processes = [psutil.Process(int(pid)) for pid in pids_file.read_text().split()]
    run.kill()
    run.wait()
    _, running_processes = psutil.wait_procs(processes, timeout=10)
    for process in running_processes:
        process.kill()
    assert running_processes == []
