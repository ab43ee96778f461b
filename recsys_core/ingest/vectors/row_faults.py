"""Unusable rows of pretrained embeddings: the fault of each row, and the error if the config does not drop such rows.

An entry is one item of the config list `embeddings`. Its rows are numbered from 0, continuously over all its files.

Shapes: R rows of an entry, X rows with the same fault.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Self

import numpy as np
from numpy.typing import NDArray

from recsys_core.ingest.row_checks import BadRow, BadRowPolicy, reject_bad_rows
from recsys_core.ingest.vectors.vector_schema import VectorFiles
from recsys_core.parquet.sources import Source


class Fault(IntEnum):
    """The reason why a row is unusable.

    A row has at most one fault: NULL_ID, EMPTY_ID and ID_OUT_OF_RANGE take precedence over the faults of its vector.
    """

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
    """Numbers of the rows, ascending."""
    column: str
    problem: str
    """Problem of the first of these rows, for a message."""


@dataclass(frozen=True)
class RowFaults:
    """The faults of all rows of an entry."""

    fault_code_R: NDArray[np.uint8]
    """Fault of each row, 0 for a usable row."""
    first_row_by_fault: Mapping[Fault, tuple[int, str, str]]
    """For each fault, the first row with this fault, its column and its problem."""

    @classmethod
    def collect(cls, num_rows: int, faulty_rows_of_batches: Iterable[Sequence[FaultyRows]]) -> Self:
        """Collect the faults of batches in any order.

        Several batches may report the same row, for different columns. They must then report the same fault.
        """
        fault_code_R = np.zeros(num_rows, np.uint8)  # zero pages take no memory until one is written, and faults are rare
        first_row_by_fault: dict[Fault, tuple[int, str, str]] = {}
        for faulty_rows_of_batch in faulty_rows_of_batches:
            for faulty_rows in faulty_rows_of_batch:
                fault = faulty_rows.fault
                fault_code_R[faulty_rows.row_X] = fault
                first_of_batch = (int(faulty_rows.row_X[0]), faulty_rows.column, faulty_rows.problem)
                first_row_by_fault[fault] = min(first_of_batch, first_row_by_fault.get(fault, first_of_batch))
        return cls(fault_code_R, first_row_by_fault)

    def merge(self, other: "RowFaults") -> "RowFaults":
        """Return the faults of `self` and `other`. A row with a fault in both has the fault of `self`."""
        if not other.first_row_by_fault:
            return self
        fault_code_R = np.where(self.fault_code_R != 0, self.fault_code_R, other.fault_code_R)
        return RowFaults(fault_code_R, {**other.first_row_by_fault, **self.first_row_by_fault})

    def faulty_row_numbers(self) -> NDArray[np.int64]:
        """Return all rows with a fault, ascending."""
        return np.flatnonzero(self.fault_code_R) if self.first_row_by_fault else np.empty(0, np.int64)

    def num_rows_by_fault(self) -> dict[str, int]:
        """Return the number of rows with each fault, by the name of the fault in lower case."""
        num_rows_by_fault = {
            fault.name.lower(): int(np.count_nonzero(self.fault_code_R == fault)) for fault in sorted(self.first_row_by_fault)
        }
        return {name: count for name, count in num_rows_by_fault.items() if count}


def reject_faults(faults: RowFaults, files: VectorFiles) -> None:
    """Raise InputError for the first faulty row, unless the config drops such rows and few enough rows are faulty."""
    num_rows_by_fault = faults.num_rows_by_fault()

    def find_first() -> BadRow:
        first_by_fault = {
            fault: first_row
            for fault, first_row in faults.first_row_by_fault.items()
            if fault.name.lower() in num_rows_by_fault
        }
        fault = min(first_by_fault, key=lambda fault: first_by_fault[fault])
        entry_row, column, problem = first_by_fault[fault]
        file_name, row = locate(files.sources, entry_row)
        return BadRow(file_name, column, row, problem, check_name=fault.name.lower(), fix="fix these rows")

    reject_bad_rows(
        num_rows_by_fault,
        num_bad=sum(num_rows_by_fault.values()),
        num_rows=files.num_rows,
        policy=BadRowPolicy(files.setting, files.config.on_bad_rows, files.config.max_bad_share),
        find_first=find_first,
    )


def locate(sources: Sequence[Source], entry_row: int) -> tuple[str, int]:
    """Return the name of the file that contains a row of the entry, and the number of the row in this file, from 0."""
    for source in sources:
        if entry_row < source.record.rows:
            return source.name, entry_row
        entry_row -= source.record.rows
    raise AssertionError("the row is in none of the files")
