"""Files that nightjar did not create, which it neither deletes nor overwrites."""

from pathlib import Path

import pytest

from recsys_core.errors import InputError
from recsys_core.manifests import MARKER_NAME, PlanManifest, fingerprint_of
from recsys_core.manifests.stage_folder import create_own_folder, remove_own_folder
from tests.recsys_core.manifests.committed_stage import commit_stage


def write_plan(folder: Path) -> dict[str, object]:
    (folder / "plan.json").write_text("{}")
    return {"world_size": 2, "device": "cpu"}


@pytest.mark.parametrize("folder_name", ["plan", "plan.tmp"])
@pytest.mark.parametrize("user_path_kind", ["folder", "link", "file"])
def test_a_stage_does_not_replace_files_of_the_user(tmp_path: Path, folder_name: str, user_path_kind: str) -> None:
    user_path = tmp_path / ("elsewhere" if user_path_kind == "link" else folder_name)
    if user_path_kind == "file":
        user_path.write_text("kept")
    else:
        user_path.mkdir()
        (user_path / "mine.npy").write_text("kept")
    if user_path_kind == "link":
        (tmp_path / folder_name).symlink_to(user_path)
    with pytest.raises(InputError, match=str(tmp_path / folder_name)):
        commit_stage(tmp_path / "plan", PlanManifest, inputs=["f"], build=write_plan)
    assert (user_path if user_path_kind == "file" else user_path / "mine.npy").read_text() == "kept"
    assert (tmp_path / folder_name).is_symlink() == (user_path_kind == "link")


def test_a_stage_replaces_an_older_stage_or_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "plan").mkdir()
    for input_text in ("a", "b"):
        manifest = commit_stage(tmp_path / "plan", PlanManifest, inputs=[input_text], build=write_plan)
        assert manifest.fingerprint == fingerprint_of(input_text) and set(manifest.files) == {"plan.json"}


def test_the_removal_of_a_folder_removes_links_but_not_their_targets(tmp_path: Path) -> None:
    user_path = tmp_path / "user"
    user_path.mkdir()
    (user_path / "mine.npy").write_text("kept")
    create_own_folder(tmp_path / "stage")
    (tmp_path / "stage" / "link").symlink_to(user_path)
    remove_own_folder(tmp_path / "stage")
    assert not (tmp_path / "stage").exists()
    assert (user_path / "mine.npy").read_text() == "kept"


def test_a_removal_that_was_interrupted_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create_own_folder(tmp_path / "stage")
    for name in "abc":
        (tmp_path / "stage" / name).write_text("")
    unlink = Path.unlink

    def unlink_once(path: Path, missing_ok: bool = False) -> None:
        monkeypatch.undo()
        unlink(path)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "unlink", unlink_once)
    with pytest.raises(KeyboardInterrupt):
        remove_own_folder(tmp_path / "stage")
    assert (tmp_path / "stage" / MARKER_NAME).is_file()
    remove_own_folder(tmp_path / "stage")
    assert not (tmp_path / "stage").exists()
