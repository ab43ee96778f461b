"""Times so far off that DuckDB stops at them: found by pyarrow, which reads them as the numbers they are stored as."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recsys_core.data.files.sources import Source
from recsys_core.data.log.checks import CLOCK, DAY_US, latest_time, shown, value_at
from recsys_core.data.log.config import InteractionsConfig
from recsys_core.errors import InputError

TICKS_PER_S = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
_BATCH_ROWS = 262_144


def refuse_wild_times(config: InteractionsConfig, sources: list[Source]) -> None:
    """InputError for the first time before 1970 or in the future, with the count; they cannot be dropped."""
    column, latest = config.timestamp_column or "", latest_time(config)
    first: tuple[Source, int] | None = None
    count = 0
    for source in sources:
        bad_N = _wild_rows(source, column, latest_us=latest)
        count += len(bad_N)
        if len(bad_N) and first is None:
            first = source, int(bad_N[0])
    if first is not None:
        source, row = first
        rows = sum(each.record.rows for each in sources)
        raise InputError(
            f"{source.name}: column {column!r}, row {row}: {shown(value_at(source, column, row))} is before 1970 or in the "
            f"future, as in {count:,} of {rows:,} rows in all, and some are so far off that they cannot be dropped; {CLOCK}"
        )


def _wild_rows(source: Source, column: str, *, latest_us: int) -> np.ndarray:
    if column not in source.schema.names:  # a hive key: a day that pyarrow has read
        return np.empty(0, np.int64)
    kind = source.schema.field(column).type
    if pa.types.is_timestamp(kind):
        stored, latest = pa.int64(), latest_us * TICKS_PER_S[kind.unit] // 1_000_000
    elif pa.types.is_date32(kind):
        stored, latest = pa.int32(), latest_us // DAY_US
    else:
        return np.empty(0, np.int64)
    found, start = [], 0
    with source.open() as file:
        for batch in file.iter_batches(_BATCH_ROWS, columns=[column]):
            time = batch.column(0).view(stored)
            wild = pc.fill_null(pc.or_(pc.less(time, 0), pc.greater(time, pa.scalar(min(latest, 2**63 - 1), pa.int64()))), False)
            found.append(start + np.flatnonzero(wild.to_numpy(zero_copy_only=False)))
            start += batch.num_rows
    return np.concatenate(found) if found else np.empty(0, np.int64)
