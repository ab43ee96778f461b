from pathlib import Path

import pytest

from recsys_core.launching.messages import HostFailure, LaunchFolder


def test_a_message_is_whole_or_absent_and_the_first_one_is_kept(tmp_path: Path) -> None:
    folder = LaunchFolder(tmp_path)
    folder.write("failure-0.json", HostFailure(node=0, host="alpha", reason="first"))
    with pytest.raises(FileExistsError):
        folder.write("failure-0.json", HostFailure(node=0, host="alpha", reason="second"))
    (tmp_path / "failure-1.json").write_text('{"node": 1,')  # as a network file system may show it for a moment
    assert [failure.reason for failure in folder.failures()] == ["first"]
    assert {path.name for path in tmp_path.iterdir()} == {"failure-0.json", "failure-1.json"}


def test_a_lease_of_another_launch_counts_as_missing(tmp_path: Path) -> None:
    folder = LaunchFolder(tmp_path)
    assert folder.read_lease("first") is None
    folder.renew_lease("first", 1)
    assert folder.read_lease("first") == "first 1"
    folder.renew_lease("second", 0)
    assert folder.read_lease("first") is None
