"""Numbers as features: where their buckets end, or by what they are standardised; both told by the training rows.

The values stand in a column of DuckDB's table `joined` (see encoding). Shapes: N values.
"""

import math
from collections.abc import Callable, Iterator
from itertools import chain

import duckdb
import numpy as np
from numpy.typing import NDArray

BATCH_ROWS = 1_000_000
FURTHEST = 10.0
"""Standard deviations from the mean that a number counts as at most: one outlier must not blow up a step."""
Numbers = NDArray[np.float64]


def quantiles(connection: duckdb.DuckDBPyConnection, column: str, *, buckets: int) -> Numbers:
    """Boundaries of `buckets` equally full buckets; fewer where a value is so frequent that it fills several."""
    # Sorted by DuckDB, which spills, and picked from the stream: its quantile functions hold all values in memory.
    ((count,),) = connection.sql(f"SELECT count(*) {_trained(column)}").fetchall()
    wanted = np.arange(buckets) * count // buckets
    picked, start = [np.zeros(0)], 0
    for batch in connection.sql(f"SELECT {column} AS value {_trained(column)} ORDER BY value").to_arrow_reader(BATCH_ROWS):
        inside = wanted[(wanted >= start) & (wanted < start + batch.num_rows)]
        picked.append(batch.column("value").to_numpy()[inside - start])
        start += batch.num_rows
    distinct: Numbers = np.unique(np.concatenate(picked))
    return distinct[1:]  # the smallest value is no boundary


def moments(connection: duckdb.DuckDBPyConnection, column: str) -> tuple[float, float]:
    """Mean and (population) standard deviation of the finite training values; (0, 0) without any.

    >>> with duckdb.connect() as connection:
    ...     _ = connection.execute("CREATE TABLE joined AS SELECT true AS trained, unnest([1, 3, 'inf'::DOUBLE]) AS v0")
    ...     moments(connection, "v0")
    (2.0, 1.0)
    """
    ((count, low, high),) = connection.sql(f"SELECT count(*), min({column}), max({column}) {_trained(column)}").fetchall()
    if not count or low == high:  # a rounded sum would find a spread in what is all the same
        return low or 0.0, 0.0
    # Squares of large numbers overflow; by a power of two nothing is rounded.
    scale = math.ldexp(1.0, math.frexp(max(abs(low), abs(high)))[1] - 1)

    def average(of: Callable[[Numbers], Numbers]) -> float:
        # Exactly rounded: DuckDB gives the rows in any order, and its own sums differ by the order.
        batches = _batches(connection, f"SELECT {column} AS value {_trained(column)}")
        return math.fsum(chain.from_iterable(of(value_N / scale).tolist() for value_N in batches)) / int(count)

    mean = average(lambda value_N: value_N)
    return mean * scale, math.sqrt(average(lambda value_N: (value_N - mean) ** 2)) * scale


def standardised(value_N: Numbers, *, mean: float, std: float) -> NDArray[np.float32]:
    """(value - mean) / std, at most 10 either way; an infinity is at the end, NaN is 0, and so is everything without a spread.

    >>> standardised(np.array([5.0, 1.0, 1000.0, -np.inf, np.nan]), mean=3.0, std=2.0).tolist()
    [1.0, -1.0, 10.0, -10.0, 0.0]
    >>> standardised(np.array([5.0, np.inf]), mean=5.0, std=0.0).tolist()
    [0.0, 0.0]
    """
    if std < np.finfo(np.float64).tiny:
        return np.zeros(len(value_N), np.float32)
    with np.errstate(over="ignore"):
        # Halves: the difference of two finite numbers may be none.
        score_N = (value_N / 2 - mean / 2) / (std / 2)
    return np.nan_to_num(np.clip(score_N, -FURTHEST, FURTHEST), nan=0.0).astype(np.float32)


def _trained(column: str) -> str:
    return f"FROM joined WHERE trained AND isfinite({column})"


def _batches(connection: duckdb.DuckDBPyConnection, query: str) -> Iterator[Numbers]:
    for batch in connection.sql(query).to_arrow_reader(BATCH_ROWS):
        yield batch.column("value").to_numpy()
