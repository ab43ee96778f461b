"""Numeric features: buckets, or standardised values.

Mean and standard deviation are computed from the training rows. The boundaries of the buckets are taken from the config or
computed from the training rows.

Shapes: N values of a batch, R users, items or events.
"""

import math
from collections.abc import Callable, Iterator
from itertools import chain

import duckdb
import numpy as np
from numpy.typing import NDArray

from recsys_core.dataset.feature_store import standardised
from recsys_core.ingest.features.feature_column import BATCH_ROWS, FeatureColumn
from recsys_core.manifests import IngestedFeature

Numbers = NDArray[np.float64]


def encode_numeric(feature_column: FeatureColumn) -> IngestedFeature:
    """Write the row of the embedding table for each number.

    With buckets, a number in bucket n gets row 1 + n. Bucket n holds numbers x with boundary[n - 1] <= x < boundary[n].
    Without buckets, each number gets row 1, and the standardised number is its weight. Null and NaN get row 0.
    """
    standardise = feature_column.feature.standardise
    boundaries: tuple[float, ...] = () if standardise else _boundaries(feature_column)
    mean, std = _mean_and_std(feature_column) if standardise else (None, None)
    table_row_R = feature_column.allocate("row", dtype=np.int32, length=feature_column.num_rows)
    weight_R = feature_column.allocate("weight", dtype=np.float32, length=feature_column.num_rows) if standardise else None
    num_present = 0
    query = f"SELECT row, v{feature_column.feature_index} AS value FROM joined"
    for batch in feature_column.connection.sql(query).to_arrow_reader(BATCH_ROWS):
        value_N = batch.column("value").to_numpy(zero_copy_only=False)  # null becomes NaN
        is_present_N = ~np.isnan(value_N)
        row_N, value_N = batch.column("row").to_numpy()[is_present_N], value_N[is_present_N]
        table_row_R[row_N] = 1 + np.searchsorted(np.array(boundaries, np.float64), value_N, side="right")
        if weight_R is not None and mean is not None and std is not None:
            weight_R[row_N] = standardised(value_N, mean=mean, std=std)
        num_present += len(row_N)
    return feature_column.manifest_entry(
        num_rows=len(boundaries) + 2,
        num_values=feature_column.num_rows,
        num_out_of_vocabulary=0,
        num_missing=feature_column.num_rows - num_present,
        boundaries=None if standardise else boundaries,
        mean=mean,
        std=std,
    )


def _boundaries(feature_column: FeatureColumn) -> tuple[float, ...]:
    """Return the boundaries of the previous run, the boundaries from the config, or new boundaries of equally full buckets."""
    if feature_column.previous is not None and feature_column.previous.ingested_feature.boundaries is not None:
        return feature_column.previous.ingested_feature.boundaries
    if feature_column.feature.boundaries is not None:
        return feature_column.feature.boundaries
    new_boundaries: list[float] = quantile_boundaries(
        feature_column.connection, f"v{feature_column.feature_index}", num_buckets=feature_column.feature.buckets or 1
    ).tolist()
    return tuple(new_boundaries)


def _mean_and_std(feature_column: FeatureColumn) -> tuple[float | None, float | None]:
    """Return the mean and the standard deviation: from the previous run, or of the training values."""
    if feature_column.previous is not None:
        return feature_column.previous.ingested_feature.mean, feature_column.previous.ingested_feature.std
    return training_mean_and_std(feature_column.connection, f"v{feature_column.feature_index}")


def quantile_boundaries(connection: duckdb.DuckDBPyConnection, column_name: str, *, num_buckets: int) -> Numbers:
    """Return the inner boundaries of equally full buckets: num_buckets - 1, or fewer if one value fills several buckets."""
    # DuckDB sorts the values and spills them to disk; its quantile functions would hold all values in memory.
    ((num_values,),) = connection.sql(f"SELECT count(*) {_finite_training_values_sql(column_name)}").fetchall()
    boundary_index = np.arange(num_buckets) * num_values // num_buckets
    boundaries_by_batch, batch_start = [np.zeros(0)], 0
    query = f"SELECT {column_name} AS value {_finite_training_values_sql(column_name)} ORDER BY value"
    for batch in connection.sql(query).to_arrow_reader(BATCH_ROWS):
        boundary_index_of_batch = boundary_index[
            (boundary_index >= batch_start) & (boundary_index < batch_start + batch.num_rows)
        ]
        boundaries_by_batch.append(batch.column("value").to_numpy()[boundary_index_of_batch - batch_start])
        batch_start += batch.num_rows
    distinct_boundaries: Numbers = np.unique(np.concatenate(boundaries_by_batch))
    return distinct_boundaries[1:]  # the smallest boundary has no value below it


def training_mean_and_std(connection: duckdb.DuckDBPyConnection, column_name: str) -> tuple[float, float]:
    """Return the mean and the population standard deviation of the finite training values; (0, 0) if there are none.

    >>> with duckdb.connect() as connection:
    ...     _ = connection.execute("CREATE TABLE joined AS SELECT true AS in_training, unnest([1, 3, 'inf'::DOUBLE]) AS v0")
    ...     training_mean_and_std(connection, "v0")
    (2.0, 1.0)
    """
    ((num_values, min_value, max_value),) = connection.sql(
        f"SELECT count(*), min({column_name}), max({column_name}) {_finite_training_values_sql(column_name)}"
    ).fetchall()
    if not num_values or min_value == max_value:  # rounding errors could make the deviation of equal values positive
        return min_value or 0.0, 0.0
    # The values are divided by a power of two, because squares of large numbers overflow. This division is exact.
    scale = math.ldexp(1.0, math.frexp(max(abs(min_value), abs(max_value)))[1] - 1)

    def average(transform: Callable[[Numbers], Numbers]) -> float:
        # fsum rounds once, so the result does not depend on the order of the rows, which DuckDB changes from run to run.
        batches = _value_batches(connection, f"SELECT {column_name} AS value {_finite_training_values_sql(column_name)}")
        return math.fsum(chain.from_iterable(transform(value_N / scale).tolist() for value_N in batches)) / int(num_values)

    scaled_mean = average(lambda value_N: value_N)
    return scaled_mean * scale, math.sqrt(average(lambda value_N: (value_N - scaled_mean) ** 2)) * scale


def _finite_training_values_sql(column_name: str) -> str:
    return f"FROM joined WHERE in_training AND isfinite({column_name})"


def _value_batches(connection: duckdb.DuckDBPyConnection, query: str) -> Iterator[Numbers]:
    for batch in connection.sql(query).to_arrow_reader(BATCH_ROWS):
        yield batch.column("value").to_numpy()
