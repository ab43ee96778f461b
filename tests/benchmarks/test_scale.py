"""The estimates of docs/scale.md: the page shows the stored result, and the formulas agree with the planner."""

import json

import pytest

from benchmarks.scale import (
    BEGIN_MARK,
    END_MARK,
    PAGE_PATH,
    RESULT_PATH,
    SIZES,
    plan_model_size,
    sent_bytes,
    to_markdown,
)


def test_the_page_shows_the_numbers_of_the_last_result() -> None:
    page = PAGE_PATH.read_text()
    shown = page[page.index(BEGIN_MARK) + len(BEGIN_MARK) : page.index(END_MARK)].strip()
    assert shown == to_markdown(json.loads(RESULT_PATH.read_text())).strip()


def test_the_bytes_of_unpooled_rows_equal_the_bytes_that_the_planner_divides_by_the_bandwidth() -> None:
    size = SIZES["1 B rows, 2 x 8 GPUs"] | {"users": 0}
    plan_file = plan_model_size(size)
    assert plan_file.tables["item"].sharding_type == "row_wise"
    sent = (
        sent_bytes(plan_file, unpooled_tables={"item"}, bytes_per_number=4)["sent"] * 16 / 15
    )  # the planner also counts rows that stay on their rank
    assert sent / 2 / 2**30 / 50 * 1000 == pytest.approx(plan_file.ranks[0].forward_comms_ms, rel=0.001)
    assert sent_bytes(plan_file, unpooled_tables={"item"}, bytes_per_number=2)["sent"] * 2 == pytest.approx(sent * 15 / 16)
