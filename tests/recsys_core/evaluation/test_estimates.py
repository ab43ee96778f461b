"""Confidence intervals of the metrics, compared with scipy and with simulated samples."""

from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from recsys_core.evaluation.config import EvaluationConfig
from recsys_core.evaluation.estimates import Accuracy, Columns, mean_estimate
from recsys_core.evaluation.metrics import TargetPositions


def test_the_interval_equals_the_interval_of_scipy() -> None:
    value_U = np.random.default_rng(0).random(500)
    low, high = stats.norm.interval(0.9, loc=value_U.mean(), scale=stats.sem(value_U))
    estimate = mean_estimate(np.append(value_U, np.nan), confidence=0.9)
    assert estimate.half_width is not None
    assert (estimate.value - estimate.half_width, estimate.value + estimate.half_width) == pytest.approx((low, high))


def test_95_percent_of_the_intervals_of_user_samples_contain_the_mean_of_all_users() -> None:
    random = np.random.default_rng(1)
    population_U = (random.random(20_000) < 0.2) * random.random(20_000)
    num_containing_intervals = 0
    for _ in range(1_000):
        estimate = mean_estimate(random.choice(population_U, 400), confidence=0.95)
        assert estimate.half_width is not None
        num_containing_intervals += abs(estimate.value - population_U.mean()) <= estimate.half_width
    assert 925 <= num_containing_intervals <= 970  # 950 of 1,000 are expected, with a standard deviation of 7


@pytest.mark.parametrize("num_users", [0, 1])
def test_fewer_than_two_users_have_no_interval(num_users: int) -> None:
    assert mean_estimate(np.full(num_users, 0.5), confidence=0.95).half_width is None


def test_only_the_metrics_of_the_config_are_computed(tmp_path: Path) -> None:
    targets = TargetPositions.from_pairs(user_T=np.arange(2), position_T=np.array([0, 4]), num_candidates_B=np.full(2, 9))
    config = EvaluationConfig(ks=(1, 5), metrics=("ndcg", "map", "auc"))
    for filters, expected_names in (
        ({}, ["ndcg@1", "map@1", "ndcg@5", "map@5"]),
        ({"metric_names": ("recall", "ndcg"), "ks": (5,)}, ["ndcg@5"]),
    ):
        accuracy = Accuracy(Columns(tmp_path), "test", config=config, **filters)
        accuracy.add(targets)
        assert list(accuracy.estimates()) == expected_names


def test_a_repeated_cut_off_is_measured_once() -> None:
    assert EvaluationConfig(ks=(20, 10, 20)).ks == (20, 10)


def test_a_column_has_the_values_of_all_chunks_and_loses_its_file_when_it_is_taken(tmp_path: Path) -> None:
    columns, value_U = Columns(tmp_path), np.random.default_rng(0).random(1_000)
    for chunk in np.split(value_U, [0, 300, 700]):  # the first chunk is empty
        columns.append("recall", chunk)
        columns.append("rows", np.arange(len(chunk)))
    assert columns.read("recall").tolist() == columns.take("recall").tolist() == value_U.tolist()
    assert columns.read("rows").dtype == np.int64 and len(columns.read("recall")) == 0
    assert len([*tmp_path.iterdir()]) == 1
    columns.append("recall", value_U[:2])
    assert (columns.read("recall").tolist(), len(columns.read("rows"))) == (value_U[:2].tolist(), 1_000)


@pytest.mark.parametrize("chunk_sizes", [[1, 2, 3], [0, 6], [6]])
def test_the_chunks_in_which_users_are_added_do_not_change_the_metrics(chunk_sizes: list[int], tmp_path: Path) -> None:
    position_T, config = np.array([0, 3, 7, 1, 0, 9]), EvaluationConfig(ks=(1, 5), confidence=0.9)
    accuracy, start = Accuracy(Columns(tmp_path), "test", config=config), 0
    for size in chunk_sizes:
        accuracy.add(
            TargetPositions.from_pairs(
                user_T=np.arange(size), position_T=position_T[start : start + size], num_candidates_B=np.full(size, 20)
            )
        )
        start += size
    assert (accuracy.num_users, accuracy.num_targets) == (6, 6)
    assert accuracy.estimates()["recall@5"] == mean_estimate((position_T < 5).astype(float), confidence=0.9)
