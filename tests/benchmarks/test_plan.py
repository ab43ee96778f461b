"""The constants of the estimates are those of the committed benchmark results, and the report shows the same numbers."""

import json

import pytest

from benchmarks import plan
from recsys_core.estimates.constants import packaged_constants

RESULTS = json.loads(plan.RESULT_PATH.read_bytes())


def test_the_packaged_constants_are_those_of_the_benchmark_results() -> None:
    derived, packaged = plan.constants_of(RESULTS), packaged_constants()
    assert derived.keys() == packaged.keys()
    for name, constant in derived.items():
        assert packaged[name].value == pytest.approx(constant.value), name
        assert packaged[name].model_copy(update={"value": 0.0}) == constant.model_copy(update={"value": 0.0}), name


def test_the_report_shows_the_comparisons_of_the_last_result() -> None:
    assert plan.PAGE_PATH.read_text(encoding="utf-8") == plan.to_markdown(RESULTS, packaged_constants())


def test_two_trainings_give_the_time_of_an_example_and_of_an_operation() -> None:
    operations = 6 * plan.TRAINED_CANDIDATES * plan.TRAINED_DIM
    query_s = {plan.TRAINING_CASES[0]: 1e-5, plan.TRAINING_CASES[1]: 1e-5 + operations * 1e-9}
    speeds = {"date": "2026-11-25", "samples_per_s": {case: plan.TRAINING_RANKS / seconds for case, seconds in query_s.items()}}
    ingest = json.loads((plan.FOLDER / "ingest.json").read_bytes())
    constants = dict(plan._training_constants(ingest, {"training": speeds}))
    assert constants["trained_example_s"].value == pytest.approx(1e-5)
    assert constants["cpu_operation_s"].value == pytest.approx(1e-9)


def test_the_page_shows_the_estimate_that_the_command_prints() -> None:
    page = plan.SCALE_PAGE_PATH.read_text(encoding="utf-8")
    shown = page[page.index(plan.BEGIN_MARK) + len(plan.BEGIN_MARK) : page.index(plan.END_MARK)].strip("\n")
    assert shown == plan.simulation_markdown(plan.ten_billion_events())
