"""Stage folders: atomic commit, detection of damage, reuse by fingerprint."""

import json
import math
import multiprocessing
import os
import signal
from collections.abc import Callable
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
)
from tests.recsys_core.manifests.committed_stage import commit_stage


class SquaresManifest(Manifest):
    """Write squares.txt and deep/cubes.txt."""

    stage: ClassVar[str] = "squares"
    count: int
    mean: float = 0.0


def write_squares(folder: Path) -> dict[str, object]:
    (folder / "squares.txt").write_text("0 1 4 9")
    (folder / "deep").mkdir()
    (folder / "deep" / "cubes.txt").write_text("0 1 8 27")
    return {"count": 4, "mean": 3.5}


def never(folder: Path) -> dict[str, object]:
    raise AssertionError(f"{folder} was built again")


def make(
    folder: Path, *, build: Callable[[Path], dict[str, object]] = write_squares, fingerprint: str = "a"
) -> SquaresManifest:
    return commit_stage(folder, SquaresManifest, fingerprint=fingerprint, build=build)


def test_the_manifest_lists_every_file_with_size_and_hash(tmp_path: Path) -> None:
    manifest = make(tmp_path / "stage")
    assert set(manifest.files) == {"squares.txt", "deep/cubes.txt"}
    assert manifest.files["squares.txt"].size_bytes == 7
    assert manifest.path("deep/cubes.txt").read_text() == "0 1 8 27"
    assert load_manifest(tmp_path / "stage", SquaresManifest) == manifest
    assert [path.name for path in tmp_path.iterdir()] == ["stage"]


def test_the_path_of_an_unlisted_file_raises(tmp_path: Path) -> None:
    with pytest.raises(StageError, match=r"squares manifest does not list the file 'roots\.txt'; it lists \['deep/cubes\.txt'"):
        make(tmp_path / "stage").path("roots.txt")


def test_the_same_fingerprint_is_reused_and_nothing_is_built(tmp_path: Path) -> None:
    assert make(tmp_path / "stage") == make(tmp_path / "stage", build=never)


def test_a_stage_can_be_moved(tmp_path: Path) -> None:
    make(tmp_path / "stage")
    (tmp_path / "stage").rename(tmp_path / "moved")
    assert make(tmp_path / "moved", build=never).path("squares.txt") == tmp_path / "moved" / "squares.txt"


def test_another_fingerprint_rebuilds_the_stage_and_removes_old_files(tmp_path: Path) -> None:
    def only_roots(folder: Path) -> dict[str, object]:
        (folder / "roots.txt").write_text("0 1")
        return {"count": 2}

    make(tmp_path / "stage")
    manifest = make(tmp_path / "stage", build=only_roots, fingerprint="b")
    assert (manifest.fingerprint, set(manifest.files)) == ("b", {"roots.txt"})
    assert {path.name for path in (tmp_path / "stage").iterdir()} == {"roots.txt", MANIFEST_NAME, MARKER_NAME}


@pytest.mark.parametrize("error", [ValueError("bad row"), KeyboardInterrupt()])
def test_an_exception_in_build_leaves_nothing_behind(tmp_path: Path, error: BaseException) -> None:
    def fail(folder: Path) -> dict[str, object]:
        write_squares(folder)
        raise error

    with pytest.raises(type(error)):
        make(tmp_path / "stage", build=fail)
    assert list(tmp_path.iterdir()) == []
    assert make(tmp_path / "stage").count == 4


def test_files_that_are_not_committed_are_removed(tmp_path: Path) -> None:
    stage = StageFolder(tmp_path / "stage", SquaresManifest, fingerprint="a")
    with stage.writing() as output_folder:
        write_squares(output_folder)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_manifest_field_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cuont"):
        make(tmp_path / "stage", build=lambda folder: {"cuont": 4})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["squares.txt", "deep/cubes.txt", MANIFEST_NAME])
def test_every_flipped_bit_in_any_file_is_noticed(tmp_path: Path, name: str) -> None:
    manifest = make(tmp_path / "stage")
    path = tmp_path / "stage" / name
    intact = path.read_bytes()
    for position in range(len(intact)):
        damaged = bytearray(intact)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        # A flip in the manifest may keep its meaning, as from 1e-05 to 1E-05; a flip in a file must be noticed.
        loaded = load_manifest(tmp_path / "stage", SquaresManifest)
        assert loaded is None or (name == MANIFEST_NAME and loaded == manifest), (
            f"byte {position}: {bytes(damaged[max(0, position - 20) : position + 20])!r}"
        )
    assert make(tmp_path / "stage").path("squares.txt").read_text() == "0 1 4 9"
    assert path.read_bytes() == intact or name == MANIFEST_NAME  # which holds the seconds


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"7", b"null", b"{}", b"\xff\xfe\x00", b'{"sha256": "x"}'])
def test_a_damaged_manifest_counts_as_none(tmp_path: Path, damage: bytes) -> None:
    make(tmp_path / "stage")
    (tmp_path / "stage" / MANIFEST_NAME).write_bytes(damage)
    assert load_manifest(tmp_path / "stage", SquaresManifest) is None
    assert make(tmp_path / "stage").count == 4


def test_a_missing_or_longer_file_is_noticed_even_without_hashing(tmp_path: Path) -> None:
    for damage in (Path.unlink, lambda path: path.write_text("0 1 4 9 16")):
        manifest = make(tmp_path / "stage")
        damage(manifest.path("squares.txt"))
        assert load_manifest(tmp_path / "stage", SquaresManifest, verify=False) is None
        with pytest.raises(StageError, match="the squares stage is incomplete"):
            require_manifest(tmp_path / "stage", SquaresManifest)


def test_a_manifest_of_another_kind_or_format_counts_as_none(tmp_path: Path) -> None:
    class CubesManifest(Manifest):
        stage: ClassVar[str] = "cubes"
        sides: int

    make(tmp_path / "stage")
    assert load_manifest(tmp_path / "stage", CubesManifest) is None
    content = json.loads((tmp_path / "stage" / MANIFEST_NAME).read_text())
    del content["sha256"]
    content["format_version"] = 2
    content["sha256"] = stage_folder._content_sha256(content)
    (tmp_path / "stage" / MANIFEST_NAME).write_text(json.dumps(content))
    assert load_manifest(tmp_path / "stage", SquaresManifest) is None
    with pytest.raises(StageError, match=r"^\S+/stage: the squares stage .* another version of nightjar wrote it; run .*\w$"):
        require_manifest(tmp_path / "stage", SquaresManifest)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.1 + 0.2, 1e-320])
def test_every_number_is_read_back_unchanged(tmp_path: Path, value: float) -> None:
    make(tmp_path / "stage", build=lambda folder: {"count": 1, "mean": value})
    assert make(tmp_path / "stage", build=never).mean == pytest.approx(value, rel=0, abs=0, nan_ok=True)


def _killed_at(point: str, folder: Path) -> None:
    """Build the stage in a child process that kills itself with SIGKILL just before `point`."""

    def die(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def build(staging: Path) -> dict[str, object]:
        if point == "first file":
            die()
        (staging / "squares.txt").write_text("0 1 4")
        if point == "last file":
            die()
        return write_squares(staging)

    targets = {"hashing": "record_files", "manifest": "_write_durably"}
    if point in targets:
        mock.patch.object(stage_folder, targets[point], die).start()
    if point == "rename":
        mock.patch.object(Path, "rename", die).start()
    make(folder, build=build, fingerprint="b")


@pytest.mark.parametrize("before", [None, "a"], ids=["nothing before", "an older stage before"])
@pytest.mark.parametrize("point", ["first file", "last file", "hashing", "manifest", "rename"])
def test_a_build_killed_at_any_point_is_redone(tmp_path: Path, point: str, before: str | None) -> None:
    folder = tmp_path / "stage"
    if before is not None:
        make(folder, fingerprint=before)
    child = multiprocessing.get_context("fork").Process(target=_killed_at, args=(point, folder))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert load_manifest(folder, SquaresManifest) is None
    manifest = make(folder, fingerprint="b")
    assert manifest.path("squares.txt").read_text() == "0 1 4 9"
    assert [path.name for path in tmp_path.iterdir()] == ["stage"]


class Settings(Frozen):
    """Two settings in the order of their declaration."""

    layers: tuple[int, ...] = (64,)
    rate: float = 0.1


def test_the_fingerprint_follows_values_and_upstream_stages(tmp_path: Path) -> None:
    upstream = make(tmp_path / "one", fingerprint="a")
    same, other = make(tmp_path / "two", fingerprint="a"), make(tmp_path / "three", fingerprint="b")
    base = fingerprint_of("train", Settings(), upstream, {"x": Path("data")})
    assert base == fingerprint_of("train", Settings(layers=(64,)), same, {"x": "data"})
    assert base != fingerprint_of("train", Settings(rate=0.2), upstream, {"x": Path("data")})
    assert base != fingerprint_of("train", Settings(), other, {"x": Path("data")})
    assert base != fingerprint_of("index", Settings(), upstream, {"x": Path("data")})


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()


@given(st.dictionaries(st.text(), scalars | st.lists(scalars)))
def test_the_fingerprint_does_not_depend_on_the_order_of_keys(parts: dict[str, object]) -> None:
    assert fingerprint_of(parts) == fingerprint_of(dict(reversed(parts.items())))


@given(st.lists(scalars), st.lists(scalars))
def test_different_parts_have_different_fingerprints(first: list[object], second: list[object]) -> None:
    assert (fingerprint_of(*first) == fingerprint_of(*second)) == (json.dumps(first) == json.dumps(second))


@pytest.mark.parametrize(
    "write",
    [
        lambda path: path.write_bytes(bytes(2**21)),
        lambda path: np.save(path, np.zeros(2**18)),
        lambda path: pq.write_table(pa.table({"a": np.random.default_rng(0).random(2**18)}), path),
        lambda path: faiss.write_index(flat_index(), str(path)),
        lambda path: save_file({"a": torch.zeros(2**19)}, path),
        lambda path: torch.save(torch.zeros(2**19), path),
    ],
    ids=["write", "numpy", "parquet", "faiss", "safetensors", "torch"],
)
def test_a_full_disk_raises_one_error_and_leaves_nothing_behind(small_disk: Path, write: Callable[[Path], object]) -> None:
    def build(folder: Path) -> dict[str, object]:
        write(folder / "large")
        return {"count": 1}

    with pytest.raises(InputError, match=rf"^{small_disk}/stage: the stage does not fit, but the disk has 0\.0.* GiB free; "):
        make(small_disk / "stage", build=build)
    assert not any(small_disk.iterdir())


def test_too_little_disk_space_raises_before_the_stage_begins(small_disk: Path) -> None:
    says = (
        rf"^{small_disk}/stage: the squares stage takes at least 1\.000 GiB, but the disk has 0\.001 GiB free; "
        rf"free some space, or set workspace to a folder on a larger disk than the one at {small_disk}$"
    )
    with pytest.raises(InputError, match=says):
        commit_stage(small_disk / "stage", SquaresManifest, fingerprint="a", build=never, min_bytes=2**30)
    manifest = make(small_disk / "stage")
    assert commit_stage(small_disk / "stage", SquaresManifest, fingerprint="a", build=never, min_bytes=2**30) == manifest


def flat_index() -> faiss.IndexFlatIP:
    index = faiss.IndexFlatIP(64)
    index.add(np.zeros((2**13, 64), np.float32))
    return index
