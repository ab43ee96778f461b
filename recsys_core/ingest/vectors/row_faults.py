"""Unusable rows of pretrained vectors: the fault of each row, and the error if the config does not drop such rows.

An entry is one element of the config list `embeddings`. Its rows are numbered from 0, continuously over all its files.

Shapes: R rows of an entry, D width of a vector.
"""

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recsys_core.errors import shown
from recsys_core.ingest.row_checks import BadRow, BadRowPolicy, reject_bad_rows, values_at
from recsys_core.ingest.vectors.vector_schema import VectorFiles
from recsys_core.parquet.sources import Source


class Fault(IntEnum):
    """The reason why a row is unusable. The code of a usable row is 0.

    A row has at most one fault: the faults of its id take precedence over the faults of its vector.
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


FaultCodes = NDArray[np.uint8]
"""The fault code of each row; 0 for a usable row."""


def mark_faults(fault_code_R: FaultCodes, is_faulty_R: NDArray[np.bool_], fault: Fault) -> None:
    """Set the fault of the rows in `is_faulty_R`. A row that already has a fault keeps that fault."""
    fault_code_R[is_faulty_R & (fault_code_R == 0)] = fault


def num_rows_by_fault(fault_code_R: FaultCodes) -> dict[str, int]:
    """Return the number of rows with each fault that occurs, by the name of the fault in lower case."""
    if not fault_code_R.any():
        return {}
    num_rows_by_name = {fault.name.lower(): int(np.count_nonzero(fault_code_R == fault)) for fault in Fault}
    return {name: num_rows for name, num_rows in num_rows_by_name.items() if num_rows}


def reject_faults(
    fault_code_R: FaultCodes, entry: VectorFiles, *, dim: int | None, first_row_with_id: Callable[[Any], int]
) -> None:
    """Raise InputError for the first faulty row, unless the config drops faulty rows and their share is small enough.

    Args:
        dim: expected width of the vectors; None if only the ids have been read.
        first_row_with_id: returns the first usable row of the entry that has an id.
    """
    num_bad_rows_by_check = num_rows_by_fault(fault_code_R)

    def find_first_bad_row() -> BadRow:
        entry_row = int(np.argmax(fault_code_R > 0))
        fault = Fault(fault_code_R[entry_row])
        source, row = locate_row(entry.sources, entry_row)
        if fault <= Fault.DUPLICATE_ID:
            column = entry.config.id_column
            (id_value,) = values_at(source, [column], row)
            if fault == Fault.DUPLICATE_ID:
                earlier_source, earlier_row = locate_row(entry.sources, first_row_with_id(id_value))
                problem = f"id {shown(id_value)} is already in {earlier_source.name}, row {earlier_row}"
            else:
                problem = id_problem(fault, id_value)
        else:
            values = values_at(source, entry.columns, row)
            column, problem = _vector_problem(fault, values, entry, dim=dim)
        return BadRow(source.name, column, row, problem, check_name=fault.name.lower(), fix="fix these rows")

    reject_bad_rows(
        num_bad_rows_by_check,
        num_bad_rows=sum(num_bad_rows_by_check.values()),
        num_rows=entry.num_rows,
        policy=BadRowPolicy(entry.setting, entry.config.on_bad_rows, entry.config.max_bad_share),
        find_first_bad_row=find_first_bad_row,
    )


def id_problem(fault: Fault, id_value: Any) -> str:
    """Describe a fault of an id for a message, except DUPLICATE_ID."""
    return {
        Fault.NULL_ID: "the id is null",
        Fault.EMPTY_ID: "the id is an empty string",
        Fault.ID_OUT_OF_RANGE: f"the id is {id_value}, but ids have to fit into int64",
    }[fault]


def _vector_problem(fault: Fault, values: Sequence[Any], entry: VectorFiles, *, dim: int | None) -> tuple[str, str]:
    """Return the column and the description of a vector's fault.

    values: the vector as one list, or the number of each dimension.
    """
    is_list = entry.config.vector_column is not None
    vector = values[0] if is_list else values
    if fault == Fault.NULL_VECTOR:
        return entry.columns[0], "the vector is null"
    if fault == Fault.WRONG_LENGTH:
        problem = f"the vector has {len(vector)} numbers, but the first vector has {dim}" if vector else "the vector is empty"
        return entry.columns[0], problem
    if fault == Fault.ALL_ZERO:
        return entry.columns[0], "all numbers of the vector are 0, so it has no direction and no cosine"
    if fault == Fault.NULL_ELEMENT:
        dimension = list(vector).index(None)
        problem = f"number {dimension} of the vector is null" if is_list else "the number is null"
    else:
        with np.errstate(over="ignore"):
            float32_D = np.array(vector, np.float64).astype(np.float32)
        dimension = int(np.argmin(np.isfinite(float32_D)))
        problem = f"number {dimension} of the vector is {float(float32_D[dimension])} as float32"
    return entry.columns[0 if is_list else dimension], problem


def locate_row(sources: Sequence[Source], entry_row: int) -> tuple[Source, int]:
    """Return the file that contains a row of the entry, and the index of the row in this file."""
    for source in sources:
        if entry_row < source.record.num_rows:
            return source, entry_row
        entry_row -= source.record.num_rows
    raise AssertionError("the row is in none of the files")
