"""Messages of a launch, which hosts and ranks write as files."""

from pathlib import Path

import pytest

from recsys_core.launching.messages import Host, HostReport, LaunchFolder


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
