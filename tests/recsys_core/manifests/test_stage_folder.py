"""Stage folders: atomic commit, detection of damage, reuse by fingerprint."""

import json
import math
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar
from unittest import mock

import faiss
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from recsys_core.config import Frozen
from recsys_core.errors import InputError, StageError
from recsys_core.manifests import (
    MANIFEST_NAME,
    MARKER_NAME,
    Manifest,
    StageFolder,
    fingerprint_of,
    load_manifest,
    require_manifest,
    stage_folder,
    without_outdated,
)
from tests.recsys_core.manifests.committed_stage import commit_stage


class SquaresManifest(Manifest):
    """Manifest of a stage with the files squares.txt and deep/cubes.txt."""

    stage: ClassVar[str] = "squares"
    count: int
    mean: float = 0.0


def write_squares(folder: Path) -> dict[str, object]:
    (folder / "squares.txt").write_text("0 1 4 9")
    (folder / "deep").mkdir()
    (folder / "deep" / "cubes.txt").write_text("0 1 8 27")
    return {"count": 4, "mean": 3.5}


def fail_if_called(folder: Path) -> dict[str, object]:
    raise AssertionError(f"{folder} was built")


def commit_squares(
    folder: Path, *, build: Callable[[Path], dict[str, object]] = write_squares, inputs: Sequence[object] = ("a",)
) -> SquaresManifest:
    return commit_stage(folder, SquaresManifest, inputs=inputs, build=build)


def test_the_manifest_lists_every_file_with_size_and_hash(tmp_path: Path) -> None:
    manifest = commit_squares(tmp_path / "stage")
    assert set(manifest.files) == {"squares.txt", "deep/cubes.txt"}
    assert manifest.files["squares.txt"].size_bytes == 7
    assert manifest.path("deep/cubes.txt").read_text() == "0 1 8 27"
    assert load_manifest(tmp_path / "stage", SquaresManifest) == manifest
    assert [path.name for path in tmp_path.iterdir()] == ["stage"]


def test_a_manifest_raises_an_error_for_a_file_that_it_does_not_list(tmp_path: Path) -> None:
    with pytest.raises(StageError, match=r"squares manifest does not list the file 'roots\.txt'; it lists \['deep/cubes\.txt'"):
        commit_squares(tmp_path / "stage").path("roots.txt")


def test_a_stage_with_the_same_fingerprint_is_reused_and_not_built_again(tmp_path: Path) -> None:
    assert commit_squares(tmp_path / "stage") == commit_squares(tmp_path / "stage", build=fail_if_called)


def test_a_moved_stage_is_reused(tmp_path: Path) -> None:
    commit_squares(tmp_path / "stage")
    (tmp_path / "stage").rename(tmp_path / "moved")
    assert commit_squares(tmp_path / "moved", build=fail_if_called).path("squares.txt") == tmp_path / "moved" / "squares.txt"


def test_another_fingerprint_rebuilds_the_stage_and_removes_old_files(tmp_path: Path) -> None:
    def write_roots(folder: Path) -> dict[str, object]:
        (folder / "roots.txt").write_text("0 1")
        return {"count": 2}

    commit_squares(tmp_path / "stage")
    manifest = commit_squares(tmp_path / "stage", build=write_roots, inputs=["b"])
    assert (manifest.fingerprint, set(manifest.files)) == (fingerprint_of("b"), {"roots.txt"})
    assert {path.name for path in (tmp_path / "stage").iterdir()} == {"roots.txt", MANIFEST_NAME, MARKER_NAME}


@pytest.mark.parametrize("error", [ValueError("bad row"), KeyboardInterrupt()])
def test_a_build_that_raises_leaves_nothing_behind(tmp_path: Path, error: BaseException) -> None:
    def write_and_fail(folder: Path) -> dict[str, object]:
        write_squares(folder)
        raise error

    with pytest.raises(type(error)):
        commit_squares(tmp_path / "stage", build=write_and_fail)
    assert list(tmp_path.iterdir()) == []
    assert commit_squares(tmp_path / "stage").count == 4


def test_files_that_are_not_committed_are_removed(tmp_path: Path) -> None:
    stage = StageFolder(tmp_path / "stage", SquaresManifest, inputs=["a"])
    with stage.writing() as output_folder:
        write_squares(output_folder)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_manifest_field_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cuont"):
        commit_squares(tmp_path / "stage", build=lambda folder: {"cuont": 4})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("file_name", ["squares.txt", "deep/cubes.txt", MANIFEST_NAME])
def test_a_flipped_bit_in_any_file_makes_the_stage_incomplete(tmp_path: Path, file_name: str) -> None:
    manifest = commit_squares(tmp_path / "stage")
    path = tmp_path / "stage" / file_name
    intact_content = path.read_bytes()
    for position in range(len(intact_content)):
        damaged_content = bytearray(intact_content)
        damaged_content[position] ^= 1 << position % 8
        path.write_bytes(damaged_content)
        # A flipped bit in the manifest may have no effect, for example if it changes 1e-05 to 1E-05.
        loaded_manifest = load_manifest(tmp_path / "stage", SquaresManifest)
        assert loaded_manifest is None or (file_name == MANIFEST_NAME and loaded_manifest == manifest), (
            f"byte {position}: {bytes(damaged_content[max(0, position - 20) : position + 20])!r}"
        )
    assert commit_squares(tmp_path / "stage").path("squares.txt").read_text() == "0 1 4 9"
    if file_name != MANIFEST_NAME:  # the duration in a new manifest differs
        assert path.read_bytes() == intact_content


@pytest.mark.parametrize("damaged_content", [b"", b"{", b"[]", b"7", b"null", b"{}", b"\xff\xfe\x00", b'{"sha256": "x"}'])
def test_a_damaged_manifest_is_read_as_none_and_the_stage_is_built_again(tmp_path: Path, damaged_content: bytes) -> None:
    commit_squares(tmp_path / "stage")
    (tmp_path / "stage" / MANIFEST_NAME).write_bytes(damaged_content)
    assert load_manifest(tmp_path / "stage", SquaresManifest) is None
    assert commit_squares(tmp_path / "stage").count == 4


def test_a_stage_with_a_missing_or_longer_file_is_incomplete_even_without_hashing(tmp_path: Path) -> None:
    for damage_file in (Path.unlink, lambda path: path.write_text("0 1 4 9 16")):
        manifest = commit_squares(tmp_path / "stage")
        damage_file(manifest.path("squares.txt"))
        assert load_manifest(tmp_path / "stage", SquaresManifest, verify=False) is None
        with pytest.raises(StageError, match="the squares stage is incomplete"):
            require_manifest(tmp_path / "stage", SquaresManifest)


def test_a_manifest_of_another_stage_or_format_is_read_as_none(tmp_path: Path) -> None:
    class CubesManifest(Manifest):
        stage: ClassVar[str] = "cubes"
        sides: int

    commit_squares(tmp_path / "stage")
    assert load_manifest(tmp_path / "stage", CubesManifest) is None
    manifest_content = json.loads((tmp_path / "stage" / MANIFEST_NAME).read_text())
    del manifest_content["sha256"]
    manifest_content["format_version"] = 2
    manifest_content["sha256"] = stage_folder._content_sha256(manifest_content)
    (tmp_path / "stage" / MANIFEST_NAME).write_text(json.dumps(manifest_content))
    assert load_manifest(tmp_path / "stage", SquaresManifest) is None
    with pytest.raises(StageError, match=r"^\S+/stage: the squares stage .* another version of nightjar wrote it; run .*\w$"):
        require_manifest(tmp_path / "stage", SquaresManifest)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 0.1 + 0.2, 1e-320])
def test_every_number_is_read_back_unchanged(tmp_path: Path, number: float) -> None:
    commit_squares(tmp_path / "stage", build=lambda folder: {"count": 1, "mean": number})
    assert commit_squares(tmp_path / "stage", build=fail_if_called).mean == pytest.approx(number, rel=0, abs=0, nan_ok=True)


def _build_and_die(kill_point: str, folder: Path) -> None:
    """Build the stage, and kill this process with SIGKILL just before `kill_point`."""

    def kill_this_process(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def build(output_folder: Path) -> dict[str, object]:
        if kill_point == "first file":
            kill_this_process()
        (output_folder / "squares.txt").write_text("0 1 4")
        if kill_point == "last file":
            kill_this_process()
        return write_squares(output_folder)

    function_name_by_point = {"hashing": "record_files", "manifest": "_write_durably"}
    if kill_point in function_name_by_point:
        mock.patch.object(stage_folder, function_name_by_point[kill_point], kill_this_process).start()
    if kill_point == "rename":
        mock.patch.object(Path, "rename", kill_this_process).start()
    commit_squares(folder, build=build, inputs=["b"])


@pytest.mark.parametrize("older_input", [None, "a"], ids=["no older stage", "an older stage"])
@pytest.mark.parametrize("kill_point", ["first file", "last file", "hashing", "manifest", "rename"])
def test_a_build_that_was_killed_at_any_point_is_repeated(tmp_path: Path, kill_point: str, older_input: str | None) -> None:
    folder = tmp_path / "stage"
    if older_input is not None:
        commit_squares(folder, inputs=[older_input])
    build_process = multiprocessing.get_context("fork").Process(target=_build_and_die, args=(kill_point, folder))
    build_process.start()
    build_process.join()
    assert build_process.exitcode == -signal.SIGKILL
    assert load_manifest(folder, SquaresManifest) is None
    manifest = commit_squares(folder, inputs=["b"])
    assert manifest.path("squares.txt").read_text() == "0 1 4 9"
    assert [path.name for path in tmp_path.iterdir()] == ["stage"]


class Settings(Frozen):
    """Settings of a stage."""

    layers: tuple[int, ...] = (64,)
    rate: float = 0.1


def test_a_manifest_has_the_fingerprints_of_its_inputs_of_the_same_run_and_is_outdated_without_them(tmp_path: Path) -> None:
    class CubesManifest(SquaresManifest):
        stage: ClassVar[str] = "cubes"

    squares_manifest = commit_squares(tmp_path / "run" / "squares")
    manifest_of_other_run = commit_squares(tmp_path / "other run" / "squares", inputs=["b"])
    inputs = ["cubes", squares_manifest, [manifest_of_other_run]]
    cubes_manifest = commit_stage(tmp_path / "run" / "cubes", CubesManifest, inputs=inputs, build=write_squares)
    assert cubes_manifest.input_fingerprints == {squares_manifest.stage: squares_manifest.fingerprint}
    assert list(without_outdated([squares_manifest, cubes_manifest])) == [squares_manifest, cubes_manifest]
    assert list(without_outdated([cubes_manifest])) == []  # a run that is resumed with other settings first removes the input
    new_squares_manifest = squares_manifest.model_copy(update={"fingerprint": "new"})
    dependent_manifest = cubes_manifest.model_copy(update={"input_fingerprints": {"cubes": cubes_manifest.fingerprint}})
    assert list(without_outdated([new_squares_manifest, cubes_manifest, dependent_manifest])) == [new_squares_manifest]
    manifest_without_inputs_of_its_run = commit_stage(
        tmp_path / "run" / "alone", CubesManifest, inputs=[manifest_of_other_run], build=write_squares
    )
    assert manifest_without_inputs_of_its_run.input_fingerprints == {}


def test_the_fingerprint_depends_on_the_stage_its_settings_and_upstream_stages(tmp_path: Path) -> None:
    upstream_manifest = commit_squares(tmp_path / "one", inputs=["a"])
    equal_upstream_manifest = commit_squares(tmp_path / "two", inputs=["a"])
    other_upstream_manifest = commit_squares(tmp_path / "three", inputs=["b"])
    fingerprint = fingerprint_of("train", Settings(), upstream_manifest, {"x": Path("data")})
    assert fingerprint == fingerprint_of("train", Settings(layers=(64,)), equal_upstream_manifest, {"x": "data"})
    assert fingerprint != fingerprint_of("train", Settings(rate=0.2), upstream_manifest, {"x": Path("data")})
    assert fingerprint != fingerprint_of("train", Settings(), other_upstream_manifest, {"x": Path("data")})
    assert fingerprint != fingerprint_of("index", Settings(), upstream_manifest, {"x": Path("data")})


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()


@given(st.dictionaries(st.text(), scalars | st.lists(scalars)))
def test_the_fingerprint_does_not_depend_on_the_order_of_keys(parts: dict[str, object]) -> None:
    assert fingerprint_of(parts) == fingerprint_of(dict(reversed(parts.items())))


@given(st.lists(scalars), st.lists(scalars))
def test_fingerprints_are_equal_if_and_only_if_their_parts_are_equal(parts: list[object], other_parts: list[object]) -> None:
    assert (fingerprint_of(*parts) == fingerprint_of(*other_parts)) == (json.dumps(parts) == json.dumps(other_parts))


@pytest.mark.parametrize(
    "write_large_file",
    [
        lambda path: path.write_bytes(bytes(2**21)),
        lambda path: np.save(path, np.zeros(2**18)),
        lambda path: pq.write_table(pa.table({"a": np.random.default_rng(0).random(2**18)}), path),
        lambda path: faiss.write_index(index_of_2_mib(), str(path)),
        lambda path: save_file({"a": torch.zeros(2**19)}, path),
        lambda path: torch.save(torch.zeros(2**19), path),
    ],
    ids=["write", "numpy", "parquet", "faiss", "safetensors", "torch"],
)
def test_a_full_disk_raises_the_same_error_for_every_library(
    small_disk: Path, write_large_file: Callable[[Path], object]
) -> None:
    def build(folder: Path) -> dict[str, object]:
        write_large_file(folder / "large")
        return {"count": 1}

    with pytest.raises(InputError, match=rf"^{small_disk}/stage: the stage does not fit, but the disk has 0\.0.* GiB free; "):
        commit_squares(small_disk / "stage", build=build)
    assert not any(small_disk.iterdir())


def test_too_little_disk_space_raises_before_the_build_unless_the_stage_is_complete(small_disk: Path) -> None:
    message = (
        rf"^{small_disk}/stage: the squares stage takes at least 1\.000 GiB, but the disk has 0\.001 GiB free; "
        rf"free some space, or set workspace to a folder on a larger disk than the one at {small_disk}$"
    )
    with pytest.raises(InputError, match=message):
        commit_stage(small_disk / "stage", SquaresManifest, inputs=["a"], build=fail_if_called, min_bytes=2**30)
    manifest = commit_squares(small_disk / "stage")
    assert commit_stage(small_disk / "stage", SquaresManifest, inputs=["a"], build=fail_if_called, min_bytes=2**30) == manifest


def index_of_2_mib() -> faiss.IndexFlatIP:
    index = faiss.IndexFlatIP(64)
    index.add(np.zeros((2**13, 64), np.float32))
    return index
