"""Files that are replaced completely or not at all, and files that are linked or copied."""

import errno
from pathlib import Path

import pytest

from recsys_core.disk import atomic_replacement, link_or_copy, write_text


def test_text_replaces_the_file_and_leaves_no_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    for text in ("first", "second: é"):
        write_text(path, text)
        assert path.read_text(encoding="utf-8") == text
    assert list(path.parent.iterdir()) == [path]


def test_the_text_is_on_the_disk_before_the_file_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state.json"
    path.write_text("old")
    synced_and_old_texts = []

    def sync(descriptor: int) -> None:
        synced_and_old_texts.append((Path(f"/proc/self/fd/{descriptor}").read_text(), path.read_text()))

    monkeypatch.setattr("os.fsync", sync)
    write_text(path, "new")
    assert synced_and_old_texts == [("new", "old")] and path.read_text() == "new"


def test_an_error_keeps_the_old_file_and_removes_the_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_text("old")

    def write_half() -> None:
        with atomic_replacement(path) as temporary_path:
            temporary_path.write_text("ne")
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        write_half()
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_file_is_linked_on_the_same_disk_and_copied_to_another_disk(tmp_path: Path, small_disk: Path) -> None:
    (tmp_path / "file").write_bytes(b"state")
    with pytest.raises(OSError, match="cross-device") as error_info:
        (small_disk / "file").hardlink_to(tmp_path / "file")
    assert error_info.value.errno == errno.EXDEV
    link_or_copy(str(tmp_path / "file"), str(small_disk / "file"))
    link_or_copy(str(tmp_path / "file"), str(tmp_path / "link"))
    assert (small_disk / "file").read_bytes() == b"state"
    assert (tmp_path / "link").samefile(tmp_path / "file")
