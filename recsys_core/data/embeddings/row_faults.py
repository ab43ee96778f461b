"""Unusable rows of pretrained embeddings: one fault code per row, and the error or the drop that follows.

Shapes: R rows of an entry, counted over all of its files; X rows with the same fault.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Self

import numpy as np
from numpy.typing import NDArray

from recsys_core.data.embeddings.schema import VectorFiles
from recsys_core.data.row_checks import BadRow, BadRowPolicy, reject_bad_rows
from recsys_core.parquet.sources import Source


class Fault(IntEnum):
    """Why a row is unusable. A row has at most one fault; a fault of the id comes before a fault of the vector."""

    NULL_ID = 1
    EMPTY_ID = 2
    ID_OUT_OF_RANGE = 3
    DUPLICATE_ID = 4
    NULL_VECTOR = 5
    WRONG_LENGTH = 6
    NULL_ELEMENT = 7
    NOT_FINITE = 8
    ALL_ZERO = 9


@dataclass(frozen=True)
class FaultyRows:
    """Rows with the same fault, from one batch."""

    fault: Fault
    row_X: NDArray[np.int64]
    """Ascending, counted over all files of the entry."""
    column: str
    problem: str
    """What is wrong with the first of the rows, for a message."""


@dataclass(frozen=True)
class RowFaults:
    """The faults of all rows of an entry."""

    code_R: NDArray[np.uint8]
    """Fault of each row, 0 for a usable row."""
    first: Mapping[Fault, tuple[int, str, str]]
    """First row with each fault, its column, and its problem."""

    @classmethod
    def collect(cls, num_rows: int, batches: Iterable[Sequence[FaultyRows]]) -> Self:
        """Collect the faults of batches that were read in any order. A row has the same fault wherever it occurs."""
        code_R = np.zeros(num_rows, np.uint8)  # zero pages take no memory until one is written, and faults are rare
        first: dict[Fault, tuple[int, str, str]] = {}
        for batch in batches:
            for rows in batch:
                code_R[rows.row_X] = rows.fault
                row = (int(rows.row_X[0]), rows.column, rows.problem)
                first[rows.fault] = min(row, first.get(rows.fault, row))
        return cls(code_R, first)

    def over(self, other: "RowFaults") -> "RowFaults":
        """Return both faults; a row with a fault in both has the fault of `self`."""
        if not other.first:
            return self
        return RowFaults(np.where(self.code_R != 0, self.code_R, other.code_R), {**other.first, **self.first})

    def rows(self) -> NDArray[np.int64]:
        """Return all rows with a fault, ascending."""
        return np.flatnonzero(self.code_R) if self.first else np.empty(0, np.int64)

    def counts(self) -> dict[str, int]:
        """Return the number of rows with each fault, by its name in lower case."""
        counts = {fault.name.lower(): int(np.count_nonzero(self.code_R == fault)) for fault in sorted(self.first)}
        return {name: count for name, count in counts.items() if count}


def reject_faults(faults: RowFaults, files: VectorFiles) -> None:
    """Raise InputError for the first faulty row, unless the config drops such rows and few enough rows are faulty."""
    counts = faults.counts()

    def find_first() -> BadRow:
        fault = min((fault for fault in faults.first if fault.name.lower() in counts), key=lambda fault: faults.first[fault])
        index, column, problem = faults.first[fault]
        file, row = locate(files.sources, index)
        return BadRow(file, column, row, problem, check_name=fault.name.lower(), fix="fix these rows")

    reject_bad_rows(
        counts,
        num_bad=sum(counts.values()),
        num_rows=files.rows,
        policy=BadRowPolicy(files.setting, files.config.on_bad_rows, files.config.max_bad_share),
        find_first=find_first,
    )


def locate(sources: Sequence[Source], row: int) -> tuple[str, int]:
    """Return the file of a row that is counted over all files, and its row in this file, from 0."""
    for source in sources:
        if row < source.record.rows:
            return source.name, row
        row -= source.record.rows
    raise AssertionError("the row is in none of the files")
