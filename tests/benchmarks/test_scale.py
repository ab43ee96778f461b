"""The estimates in docs/scale.md: the page shows the committed result, and the sent bytes agree with the planner."""

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


def test_the_page_shows_the_numbers_of_the_committed_result() -> None:
    page = PAGE_PATH.read_text()
    shown_text = page[page.index(BEGIN_MARK) + len(BEGIN_MARK) : page.index(END_MARK)].strip()
    assert shown_text == to_markdown(json.loads(RESULT_PATH.read_text())).strip()


def test_the_sent_bytes_of_unpooled_rows_agree_with_the_communication_time_of_the_planner() -> None:
    model_size = SIZES["1 B rows, 2 x 8 GPUs"] | {"users": 0}
    plan_file = plan_model_size(model_size)
    assert plan_file.tables["item"].sharding_type == "row_wise"
    num_sent_bytes = sent_bytes(plan_file, unpooled_tables={"item"}, bytes_per_number=4)["sent"]
    num_planned_bytes = num_sent_bytes * 16 / 15  # the planner also counts the 1/16 of the rows that stay on their rank
    # Half of the bytes are sent in the forward pass, at 50 GiB/s.
    assert num_planned_bytes / 2 / 2**30 / 50 * 1000 == pytest.approx(plan_file.ranks[0].forward_comms_ms, rel=0.001)
    assert sent_bytes(plan_file, unpooled_tables={"item"}, bytes_per_number=2)["sent"] * 2 == pytest.approx(num_sent_bytes)
