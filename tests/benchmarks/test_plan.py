"""The packaged constants of the estimates, and the pages about them, compared with the committed benchmark results."""

import pytest

from benchmarks import plan
from recsys_core.estimates.stage_estimate import ASSUMPTIONS, packaged_constants


def test_the_packaged_constants_equal_the_constants_from_the_benchmark_results() -> None:
    derived_constants = plan.measured_constants() | ASSUMPTIONS
    constants_of_package = packaged_constants()
    assert derived_constants.keys() == constants_of_package.keys()
    for name, constant in derived_constants.items():
        assert constants_of_package[name].value == pytest.approx(constant.value), name
        assert constants_of_package[name].model_copy(update={"value": 0.0}) == constant.model_copy(update={"value": 0.0}), name


def test_the_committed_report_is_the_report_of_the_committed_result() -> None:
    assert plan.PAGE_PATH.read_text(encoding="utf-8") == plan.to_markdown()


def test_the_speeds_of_two_trainings_give_the_time_of_an_example_and_of_an_operation() -> None:
    num_operations = 6 * plan.TRAINED_CANDIDATES * plan.TRAINED_DIM
    plan_result = plan.Result("plan")
    plan_result.content["trainings"]["samples_per_s"] = {
        "two_ids": plan.NUM_RANKS / 1e-5,
        "history": plan.NUM_RANKS / (1e-5 + num_operations * 1e-9),
    }
    constants = plan._training_constants(plan_result, ingest=plan.Result("ingest"))
    assert constants["trained_example_s"].value == pytest.approx(1e-5)
    assert constants["cpu_operation_s"].value == pytest.approx(1e-9)


def test_the_scale_page_shows_the_estimate_for_ten_billion_events() -> None:
    page = plan.SCALE_PAGE_PATH.read_text(encoding="utf-8")
    shown_text = page[page.index(plan.BEGIN_MARK) + len(plan.BEGIN_MARK) : page.index(plan.END_MARK)].strip("\n")
    assert shown_text == plan.ten_billion_events()
