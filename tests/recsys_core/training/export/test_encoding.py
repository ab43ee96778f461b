"""Arrays that several ranks write: equal to an array written by one rank; a full disk is an error."""

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

NUM_ROWS, COLUMNS = 1_000, 6
WHOLE = torch.arange(NUM_ROWS * COLUMNS, dtype=torch.float32).reshape(NUM_ROWS, COLUMNS)


def writer_of(rank: int, folder: Path, *, world_size: int | None = None) -> RankWriter:
    process = Process(rank=rank, world_size=world_size or dist.get_world_size(), device=torch.device("cpu"))
    return RankWriter(process, heartbeat_path=folder / "heartbeat")


def write_halves(rank: int, folder: Path) -> None:
    writer = writer_of(rank, folder)
    by_rows, by_columns = (slice(rank * 300, 300 + rank * 700), slice(None)), (slice(None), slice(rank * 2, 2 + rank * 4))
    for path, place in ((folder / "rows.npy", by_rows), (folder / "columns.npy", by_columns)):
        with writer.part(path) as part:
            part.add(place[0].start or 0, place[1].start or 0, WHOLE[place])
        writer.build(path, shape=(NUM_ROWS, COLUMNS))
    with writer.part(folder / "accumulator.npy") as part:
        part.add(0, 0, WHOLE[:, :1])
    writer.build(folder / "accumulator.npy", shape=(NUM_ROWS,), accumulate=True)


def test_rows_and_columns_of_two_ranks_make_one_array_and_overlapping_records_add_up(tmp_path: Path) -> None:
    run_ranks(write_halves, world_size=2, arguments=(tmp_path,))
    np.testing.assert_array_equal(np.load(tmp_path / "rows.npy"), WHOLE.numpy())
    np.testing.assert_array_equal(np.load(tmp_path / "columns.npy"), WHOLE.numpy())
    np.testing.assert_array_equal(np.load(tmp_path / "accumulator.npy"), 2 * WHOLE[:, 0].numpy())
    assert {path.name for path in tmp_path.iterdir()} == {"rows.npy", "columns.npy", "accumulator.npy", "heartbeat"}


def open_alone(rank: int, folder: Path) -> None:
    """Assert that this rank has no file of another rank open."""
    writer = writer_of(rank, folder)
    with writer.part(folder / "array.npy") as part:
        part.add(rank, 0, torch.ones(1, 2))
        dist.barrier()
        open_files = {os.path.realpath(path) for path in Path("/proc/self/fd").iterdir()}
        maps = Path("/proc/self/maps").read_text()
        assert {name for name in open_files if name.startswith(str(folder))} == {str(folder / f"array.npy.rank-{rank}")}
        assert str(folder) not in maps


def test_no_rank_opens_or_maps_a_file_that_another_one_writes(tmp_path: Path) -> None:
    run_ranks(open_alone, world_size=2, arguments=(tmp_path,))


def fill_the_disk(rank: int, folder: Path, megabytes: float) -> None:
    writer = writer_of(rank, folder)
    values = torch.ones(int(megabytes * 2**18) // COLUMNS, COLUMNS)
    try:
        with writer.part(folder / "array.npy") as part:
            if rank == 0:
                part.add(0, 0, values)
        writer.build(folder / "array.npy", shape=tuple(values.shape))
    except InputError as error:
        (folder.parent / f"error-{rank}").write_text(str(error))
        if megabytes > 1:
            dist.barrier()  # the other rank waits at this barrier inside `build`


@pytest.mark.parametrize("megabytes", [2, 0.6])
def test_a_disk_that_fills_up_in_a_part_or_in_the_array_is_an_error_and_no_signal(
    tmp_path: Path, small_disk: Path, megabytes: float
) -> None:
    run_ranks(fill_the_disk, world_size=2, arguments=(small_disk, megabytes))
    message = (tmp_path / "error-0").read_text()
    assert (
        message.startswith(str(small_disk))
        and "but the disk has 0.00" in message
        and message.endswith(f"the one at {small_disk}")
    )


def part_of(folder: Path, *records: tuple[int, int, torch.Tensor]) -> Path:
    """Write an array with one part that holds `records`; return its path."""
    with (folder / "array.npy.rank-0").open("wb") as file:
        for record in records:
            Part(file).add(*record)
    return folder / "array.npy"


@pytest.mark.parametrize(
    ("records", "says"),
    [
        ([(0, 0, torch.ones(3, 2))], r"the 1 ranks wrote 6 values, but the array has 8"),
        (
            [(2, 0, torch.ones(3, 2))],
            r"record of 3 x 2 values at row 2, column 0 is cut off or does not fit into an array of 4 x 2",
        ),
    ],
)
def test_the_error_names_records_that_are_missing_or_do_not_fit_the_array(
    tmp_path: Path, records: list[tuple[int, int, torch.Tensor]], says: str
) -> None:
    with pytest.raises(StageError, match=says):
        writer_of(0, tmp_path, world_size=1).fill(np.zeros((4, 2), np.float32), path=part_of(tmp_path, *records))


@pytest.mark.parametrize("cut", [5, 40])
def test_the_error_names_a_part_file_that_is_cut_off_or_missing(tmp_path: Path, cut: int) -> None:
    path = part_of(tmp_path, (0, 0, torch.ones(4, 2)))
    part = path.with_name("array.npy.rank-0")
    part.write_bytes(part.read_bytes()[:cut])
    with pytest.raises(StageError, match=r"array\.npy\.rank-0: a record .* is cut off"):
        writer_of(0, tmp_path, world_size=1).fill(np.zeros((4, 2), np.float32), path=path)
    part.unlink()
    with pytest.raises(StageError, match=r"array\.npy\.rank-0: this file of another rank is not visible here"):
        writer_of(0, tmp_path, world_size=1).fill(np.zeros((4, 2), np.float32), path=path)
