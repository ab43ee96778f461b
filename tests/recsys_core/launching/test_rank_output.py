"""The output of rank 0 as log records."""

import logging
from pathlib import Path

import pytest

from recsys_core.launching.rank_output import MAX_LOGGED_LINES, RankOutput


def test_complete_lines_of_rank_0_are_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    output = RankOutput(tmp_path)
    output.relay()  # no rank has started
    for rank in (0, 1):
        folder = tmp_path / "node-0" / "token" / "attempt_0" / str(rank)
        folder.mkdir(parents=True)
        (folder / "stderr.log").write_text(f"a warning of rank {rank}\nhalf a")
    output.relay()
    with (tmp_path / "node-0" / "token" / "attempt_0" / "0" / "stderr.log").open("a") as file:
        file.write(" line\n")
    output.relay()
    output.relay()
    assert [record.getMessage() for record in caplog.records] == ["rank 0: a warning of rank 0", "rank 0: half a line"]
    assert {record.__dict__["rank"] for record in caplog.records} == {0}


def test_a_rank_that_prints_without_end_does_not_fill_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    file = tmp_path / "node-0" / "token" / "attempt_0" / "0" / "stdout.log"
    file.parent.mkdir(parents=True)
    file.write_text("line\n" * (MAX_LOGGED_LINES + 100))
    output = RankOutput(tmp_path)
    output.relay()
    output.relay()
    assert len(caplog.records) == MAX_LOGGED_LINES + 1
    assert str(file) in caplog.records[-1].getMessage()
