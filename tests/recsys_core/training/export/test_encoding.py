"""Arrays that several ranks write in parts, and errors of full disks and damaged parts."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import distributed as dist

from recsys_core.errors import InputError, StageError
from recsys_core.launching.rank import Process
from recsys_core.training.export.encoding import Part, RankWriter
from tests.gloo import run_ranks

NUM_ROWS, NUM_COLUMNS = 1_000, 6
VALUE_RC = torch.arange(NUM_ROWS * NUM_COLUMNS, dtype=torch.float32).reshape(NUM_ROWS, NUM_COLUMNS)
"""The array that two ranks write in parts."""


def writer_of(rank: int, folder: Path, *, world_size: int | None = None) -> RankWriter:
    process = Process(rank=rank, world_size=world_size or dist.get_world_size(), device=torch.device("cpu"))
    return RankWriter(process, heartbeat_path=folder / "heartbeat")


def write_parts(rank: int, folder: Path) -> None:
    """Write this rank's part of an array by rows, of an array by columns, and of an array whose parts overlap."""
    writer = writer_of(rank, folder)
    own_rows, own_columns = (slice(0, 300), slice(300, NUM_ROWS))[rank], (slice(0, 2), slice(2, NUM_COLUMNS))[rank]
    all_rows, all_columns = slice(0, NUM_ROWS), slice(0, NUM_COLUMNS)
    for name, rows, columns in (("rows.npy", own_rows, all_columns), ("columns.npy", all_rows, own_columns)):
        array_path = folder / name
        with writer.part(array_path) as part:
            part.add(rows.start, columns.start, VALUE_RC[rows, columns])
        writer.build(array_path, shape=(NUM_ROWS, NUM_COLUMNS))
    with writer.part(folder / "accumulator.npy") as part:
        part.add(0, 0, VALUE_RC[:, :1])
    writer.build(folder / "accumulator.npy", shape=(NUM_ROWS,), accumulate=True)


def test_rows_or_columns_of_two_ranks_make_one_array(tmp_path: Path) -> None:
    run_ranks(write_parts, world_size=2, arguments=(tmp_path,))
    np.testing.assert_array_equal(np.load(tmp_path / "rows.npy"), VALUE_RC.numpy())
    np.testing.assert_array_equal(np.load(tmp_path / "columns.npy"), VALUE_RC.numpy())
    np.testing.assert_array_equal(np.load(tmp_path / "accumulator.npy"), 2 * VALUE_RC[:, 0].numpy())
    assert {path.name for path in tmp_path.iterdir()} == {"rows.npy", "columns.npy", "accumulator.npy", "heartbeat"}


def open_own_part(rank: int, folder: Path) -> None:
    """Write a part, and assert that this rank has no file of another rank open."""
    writer = writer_of(rank, folder)
    with writer.part(folder / "array.npy") as part:
        part.add(rank, 0, torch.ones(1, 2))
        dist.barrier()
        open_paths = {os.path.realpath(path) for path in Path("/proc/self/fd").iterdir()}
        memory_maps = Path("/proc/self/maps").read_text()
        assert {path for path in open_paths if path.startswith(str(folder))} == {str(folder / f"array.npy.rank-{rank}")}
        assert str(folder) not in memory_maps


def test_no_rank_opens_or_maps_a_file_that_another_rank_writes(tmp_path: Path) -> None:
    run_ranks(open_own_part, world_size=2, arguments=(tmp_path,))


def fill_the_disk(rank: int, folder: Path, part_mib: float) -> None:
    """Write an array that does not fit on the disk, and store the error message of this rank in a file."""
    writer = writer_of(rank, folder)
    ones_RC = torch.ones(int(part_mib * 2**18) // NUM_COLUMNS, NUM_COLUMNS)
    try:
        with writer.part(folder / "array.npy") as part:
            if rank == 0:
                part.add(0, 0, ones_RC)
        writer.build(folder / "array.npy", shape=tuple(ones_RC.shape))
    except InputError as error:
        (folder.parent / f"error-{rank}").write_text(str(error))
        if part_mib > 1:  # the part does not fit, so the other rank waits at this barrier in `build`
            dist.barrier()


@pytest.mark.parametrize("part_mib", [2, 0.6], ids=["part does not fit", "part and array together do not fit"])
def test_a_disk_that_fills_up_is_an_input_error_and_kills_no_rank(tmp_path: Path, small_disk: Path, part_mib: float) -> None:
    run_ranks(fill_the_disk, world_size=2, arguments=(small_disk, part_mib))
    message = (tmp_path / "error-0").read_text()
    assert message.startswith(str(small_disk)) and message.endswith(f"the one at {small_disk}")
    assert "but the disk has 0.00" in message


def write_part(folder: Path, *records: tuple[int, int, torch.Tensor]) -> Path:
    """Write `records` (row, column, values) to the part of rank 0, and return the path of the array."""
    with (folder / "array.npy.rank-0").open("wb") as file:
        for record in records:
            Part(file).add(*record)
    return folder / "array.npy"


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([(0, 0, torch.ones(3, 2))], r"the 1 ranks wrote 6 values, but the array has 8"),
        (
            [(2, 0, torch.ones(3, 2))],
            r"record of 3 x 2 values at row 2, column 0 is cut off or does not fit into an array of 4 x 2",
        ),
    ],
)
def test_records_that_are_missing_or_do_not_fit_into_the_array_are_an_error(
    tmp_path: Path, records: list[tuple[int, int, torch.Tensor]], message: str
) -> None:
    with pytest.raises(StageError, match=message):
        writer_of(0, tmp_path, world_size=1).fill(np.zeros((4, 2), np.float32), path=write_part(tmp_path, *records))


@pytest.mark.parametrize("num_bytes_left", [5, 40], ids=["cut off in the header", "cut off in the values"])
def test_the_error_names_a_part_file_that_is_cut_off_or_missing(tmp_path: Path, num_bytes_left: int) -> None:
    array_path = write_part(tmp_path, (0, 0, torch.ones(4, 2)))
    part_path = array_path.with_name("array.npy.rank-0")
    part_path.write_bytes(part_path.read_bytes()[:num_bytes_left])
    with pytest.raises(StageError, match=r"array\.npy\.rank-0: a record .* is cut off"):
        writer_of(0, tmp_path, world_size=1).fill(np.zeros((4, 2), np.float32), path=array_path)
    part_path.unlink()
    with pytest.raises(StageError, match=r"array\.npy\.rank-0: this file of another rank is not visible here"):
        writer_of(0, tmp_path, world_size=1).fill(np.zeros((4, 2), np.float32), path=array_path)
