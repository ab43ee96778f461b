"""Messages of a launch, which hosts and ranks write as files."""

import tracemalloc
from pathlib import Path

import pytest

from recsys_core.launching.messages import NUM_LAST_LINES, Host, HostReport, LaunchFolder, last_lines


def test_a_message_is_never_replaced_and_a_truncated_message_is_ignored(tmp_path: Path) -> None:
    folder, host = LaunchFolder(tmp_path), Host(index=0, name="alpha")
    folder.report_end(HostReport(host=host, pid=1, reason="first"))
    with pytest.raises(FileExistsError):
        folder.report_end(HostReport(host=host, pid=1, reason="second"))
    (tmp_path / "end-1.json").write_text('{"host": 1,')
    assert [report.reason for report in folder.end_reports()] == ["first"]


def test_the_lease_of_another_launch_is_not_read(tmp_path: Path) -> None:
    folder = LaunchFolder(tmp_path)
    assert folder.read_lease("first") is None
    folder.renew_lease("first", 1)
    assert folder.read_lease("first") == "first 1"
    folder.renew_lease("second", 0)
    assert folder.read_lease("first") is None


def test_the_last_lines_of_a_large_log_are_read_without_reading_all_of_it(tmp_path: Path) -> None:
    log_path = tmp_path / "stderr.log"
    with log_path.open("wb") as log_file:
        log_file.truncate(2**28)
        log_file.seek(2**28)
        log_file.write("".join(f"\nline {number} é" for number in range(20)).encode())
    tracemalloc.start()
    try:
        lines = last_lines(log_path).split("\n")
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert lines == [f"line {number} é" for number in range(20 - NUM_LAST_LINES, 20)]
    assert peak_bytes < 2**20
    log_path.write_text("only line\n")
    assert last_lines(log_path) == "only line"
