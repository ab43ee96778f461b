"""Numbers of a trial that can be checked by hand."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.registry.smoke_test import K, Trial, find_faults, measure, prepare_trial
from tests.recsys_core.evaluation.stages import interactions_stage

ITEMS = 30


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    """Item row r has the id 100 + r; the second user has no test event, the third saw its only target before."""
    interactions = interactions_stage(
        tmp_path / "interactions",
        train=[[0, 1], [2], [3]],
        validation=[[2], [], []],
        test=[[4, 5, 4], [], [3]],
        items=ITEMS,
        item_ids=list(range(100, 100 + ITEMS)),
        user_ids=[7, 8, 9],
    )
    return prepare_trial(interactions, users=10, folder=tmp_path / "trial")


def answers(first: list[int], second: list[int]) -> pa.ListArray:
    return pa.array([first, second], type=pa.list_(pa.int64()))


def test_users_with_test_events_are_asked_with_all_they_had_before(trial: Trial) -> None:
    assert pq.read_table(trial.file).to_pydict() == {"user_id": [7, 9], "history": [[100, 101, 102], [103]]}


def test_metrics_count_each_target_once_and_leave_out_users_whose_targets_were_seen(trial: Trial) -> None:
    found = measure(answers([110, 104, *range(111, 129)], [*range(105, 125)]), trial=trial)
    # One of the targets 104 and 105, on place 2: gain 1/log2(3) of an ideal 1 + 1/log2(3).
    assert found == pytest.approx({"recall@20": 0.5, "hit_rate@10": 1.0, "ndcg@20": 0.6309298 / 1.6309298})


def test_a_hit_below_the_tenth_place_is_no_hit_at_10(trial: Trial) -> None:
    found = measure(answers([*range(110, 120), 105], []), trial=trial)
    assert (found["hit_rate@10"], found["recall@20"]) == (0.0, 0.5)


def test_good_answers_have_no_faults(trial: Trial) -> None:
    assert find_faults(answers(list(range(103, 123)), list(range(104, 124))), trial=trial) == []


@pytest.mark.parametrize(
    ("first", "fault"),
    [
        ([-1, *range(104, 123)], "1 items that are not in the catalogue"),
        ([100 + ITEMS, *range(104, 123)], "1 items that are not in the catalogue"),
        ([101, 102, *range(104, 122)], "2 items the user had before"),
        ([104, *range(104, 123)], "1 items recommended twice to one user"),
        (list(range(104, 114)), "1 users with other than 20 items (or all unseen ones)"),
    ],
)
def test_each_fault_is_found_and_counted(trial: Trial, first: list[int], fault: str) -> None:
    assert find_faults(answers(first, list(range(104, 104 + K))), trial=trial) == [f"{fault} (of 2 users)"]


def test_the_sample_is_the_same_every_time(tmp_path: Path) -> None:
    interactions = interactions_stage(
        tmp_path / "interactions", train=[[0]] * 50, validation=[[]] * 50, test=[[1]] * 50, items=3
    )
    first, second = (prepare_trial(interactions, users=5, folder=tmp_path / name) for name in ("a", "b"))
    assert first.users == 5
    assert pq.read_table(first.file).equals(pq.read_table(second.file))
