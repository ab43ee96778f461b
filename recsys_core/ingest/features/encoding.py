"""Encoding of a feature: each value of a user, item or event becomes a row number of the feature's embedding table.

Categorical and list features use a vocabulary (table `vocabulary`: value, count, row) or a hash, numeric features use buckets
or a standardised value (numeric.py). Row 0 of the embedding table is for values that have no row of their own.

Shapes: R users, items or events, N rows of a batch, L values of all lists.
"""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recsys_core.errors import InputError
from recsys_core.ingest.features.feature_column import BATCH_ROWS, FeatureColumn
from recsys_core.ingest.features.numeric import encode_numeric
from recsys_core.manifests import IngestedFeature
from recsys_core.parquet.duckdb_session import SQL_TYPE, scan_sql


def encode(feature_column: FeatureColumn) -> IngestedFeature:
    """Write the files of one feature (see FeaturesManifest), and return its entry in the manifest."""
    if feature_column.feature.kind == "numeric":
        return encode_numeric(feature_column)
    feature_column.connection.execute(f"CREATE VIEW single_values AS {_single_values_sql(feature_column)}")
    encode_values = _encode_by_vocabulary if feature_column.feature.hash_rows is None else _encode_by_hash
    ingested_feature = encode_values(feature_column)
    feature_column.connection.execute("DROP VIEW single_values")
    return ingested_feature


def _single_values_sql(feature_column: FeatureColumn) -> str:
    """Return SQL for one row per value: row, in_training, value and, for a list feature, list_index and weight."""
    values_sql = feature_column.value_sql()
    if not feature_column.feature.is_list:
        return f"SELECT row, in_training, {values_sql} AS value FROM joined"
    weight_sql = f", unnest({feature_column.weight_sql()}) AS weight" if feature_column.feature.weight_column else ""
    list_index_sql = f"unnest(range(len({values_sql}))) AS list_index"
    return f"SELECT row, in_training, unnest({values_sql}) AS value, {list_index_sql}{weight_sql} FROM joined"


def _encode_by_vocabulary(feature_column: FeatureColumn) -> IngestedFeature:
    num_new_values, num_evicted_values = create_vocabulary(feature_column)
    count_by_field = _write_rows(
        feature_column, table_row_sql="vocabulary.row", source_sql="single_values LEFT JOIN vocabulary USING (value)"
    )
    write_vocabulary(feature_column)
    num_table_rows = 1 + feature_column.fetch_count("SELECT coalesce(max(row), 0) FROM vocabulary")
    num_with_vector = write_vector_rows(feature_column, num_table_rows=num_table_rows)
    feature_column.connection.execute("DROP TABLE vocabulary")
    return feature_column.manifest_entry(
        num_rows=num_table_rows,
        num_new_values=num_new_values,
        num_evicted_values=num_evicted_values,
        num_with_vector=num_with_vector,
        **count_by_field,
    )


def _encode_by_hash(feature_column: FeatureColumn) -> IngestedFeature:
    # md5, because DuckDB's own hash may differ between versions of DuckDB.
    table_row_sql = f"1 + md5_number_lower(CAST(value AS VARCHAR)) % {feature_column.feature.hash_rows}"
    count_by_field = _write_rows(feature_column, table_row_sql=table_row_sql, source_sql="single_values")
    return feature_column.manifest_entry(num_rows=1 + (feature_column.feature.hash_rows or 0), **count_by_field)


def _write_rows(feature_column: FeatureColumn, *, table_row_sql: str, source_sql: str) -> dict[str, int]:
    """Write the table row of every value; return the counts for the manifest, by field of IngestedFeature.

    Args:
        table_row_sql: SQL for the row of a value in the embedding table; null for a value without a row.
        source_sql: SQL for the view `single_values`, joined with the table that `table_row_sql` reads, if any.
    """
    if feature_column.feature.is_list:
        return _write_lists(feature_column, table_row_sql=table_row_sql, source_sql=source_sql)
    table_row_R = feature_column.allocate("row", dtype=np.int32, length=feature_column.num_rows)
    num_present = num_unknown = 0
    query = f"SELECT single_values.row, coalesce({table_row_sql}, 0)::INTEGER FROM {source_sql} WHERE value IS NOT NULL"
    for row_N, table_row_N in _array_batches(feature_column, query):
        table_row_R[row_N] = table_row_N
        num_present += len(row_N)
        num_unknown += int((table_row_N == 0).sum())
    return {
        "num_values": feature_column.num_rows,
        "num_out_of_vocabulary": num_unknown,
        "num_missing": feature_column.num_rows - num_present,
    }


def _write_lists(feature_column: FeatureColumn, *, table_row_sql: str, source_sql: str) -> dict[str, int]:
    """Write the lists in CSR format. List n is row[offset[n]:offset[n + 1]]; `weight` has one entry for each entry of `row`."""
    offset = feature_column.allocate("offset", dtype=np.int64, length=feature_column.num_rows + 1)
    num_empty = feature_column.num_rows
    query = f"SELECT row, len({feature_column.value_sql()}) FROM joined WHERE len(v{feature_column.feature_index}) > 0"
    for row_N, length_N in _array_batches(feature_column, query):
        offset[1 + row_N] = length_N
        num_empty -= len(row_N)
    np.cumsum(offset, out=offset)

    num_values, num_unknown = int(offset[-1]), 0
    table_row_L = feature_column.allocate("row", dtype=np.int32, length=num_values)
    has_weights = feature_column.feature.weight_column is not None
    weight_L = feature_column.allocate("weight", dtype=np.float32, length=num_values) if has_weights else None
    weight_sql = ", weight" if has_weights else ""
    query = f"SELECT single_values.row, coalesce({table_row_sql}, 0)::INTEGER, list_index{weight_sql} FROM {source_sql}"
    for row_N, table_row_N, list_index_N, *weight_columns in _array_batches(feature_column, query):
        value_index_N = offset[row_N] + list_index_N
        table_row_L[value_index_N] = table_row_N
        if weight_L is not None:
            weight_L[value_index_N] = weight_columns[0]
        num_unknown += int((table_row_N == 0).sum())

    max_values, num_truncated = feature_column.feature.max_values, 0
    if max_values is not None:
        num_truncated = feature_column.fetch_count(
            f"SELECT count(*) FROM joined WHERE len(v{feature_column.feature_index}) > {max_values}"
        )
    return {
        "num_values": num_values,
        "num_out_of_vocabulary": num_unknown,
        "num_missing": num_empty,
        "num_truncated": num_truncated,
    }


def _array_batches(feature_column: FeatureColumn, query: str) -> Iterator[tuple[NDArray[np.int64], ...]]:
    """Yield the columns of the result of `query` as arrays [N], one batch at a time."""
    for batch in feature_column.connection.sql(query).to_arrow_reader(BATCH_ROWS):
        yield tuple(array.to_numpy(zero_copy_only=False) for array in batch.columns)


def create_vocabulary(feature_column: FeatureColumn) -> tuple[int, int]:
    """Create table `vocabulary` from the view `single_values`; return the numbers of new and of evicted values.

    The values of the previous run keep their rows. New values follow by decreasing count, then by value. With `max_rows`, only
    the most frequent values have rows, and new values first get the rows of evicted values. A new value does not
    evict a value of the previous run with the same count.
    """
    connection = feature_column.connection
    connection.execute(
        "CREATE TEMP TABLE value_counts AS SELECT value, count(*) AS count FROM single_values "
        f"WHERE {feature_column.counted_row_sql} AND value IS NOT NULL GROUP BY value"
    )
    if feature_column.previous is not None and feature_column.previous.vocabulary_path is not None:
        # Row 0 of the file is shared by all values without a row.
        previous_file_sql = scan_sql(feature_column.previous.vocabulary_path, options_sql="file_row_number = true")
        previous_rows_sql = f"(SELECT value, file_row_number AS row FROM {previous_file_sql} WHERE file_row_number > 0)"
        connection.execute(
            "CREATE TEMP TABLE vocabulary AS SELECT previous.value, coalesce(value_counts.count, 0) AS count, previous.row "
            f"FROM {previous_rows_sql} previous LEFT JOIN value_counts ON previous.value = value_counts.value"
        )
    else:
        value_sql_type = SQL_TYPE[feature_column.value_type or "string"]
        connection.execute(f"CREATE TEMP TABLE vocabulary (value {value_sql_type}, count BIGINT, row BIGINT)")
    num_previous_values = feature_column.fetch_count("SELECT count(*) FROM vocabulary")
    connection.execute(
        "CREATE TEMP TABLE new_values AS SELECT value, count FROM value_counts ANTI JOIN vocabulary USING (value) "
        f"WHERE count >= {feature_column.feature.min_count}"
    )
    num_evicted_values = 0
    if feature_column.feature.max_rows is not None:
        num_evicted_values = _evict_rare_values(feature_column, max_rows=feature_column.feature.max_rows)
    connection.execute(
        "CREATE TEMP TABLE free_rows AS SELECT row, row_number() OVER (ORDER BY row) AS place "
        f"FROM (SELECT unnest(range(1, {num_previous_values + 1})) AS row) ANTI JOIN vocabulary USING (row)"
    )
    connection.execute(
        f"INSERT INTO vocabulary SELECT value, count, coalesce(row, {num_previous_values - num_evicted_values} + place) "
        "FROM (SELECT *, row_number() OVER (ORDER BY count DESC, value) AS place FROM new_values) "
        "LEFT JOIN free_rows USING (place)"
    )
    for table_name in ("value_counts", "new_values", "free_rows"):
        connection.execute(f"DROP TABLE {table_name}")
    num_values = feature_column.fetch_count("SELECT count(*) FROM vocabulary")
    return num_values - (num_previous_values - num_evicted_values), num_evicted_values


def _evict_rare_values(feature_column: FeatureColumn, *, max_rows: int) -> int:
    """Keep the most frequent values of the tables `vocabulary` and `new_values`; return the number of evicted values."""
    connection = feature_column.connection
    connection.execute(
        "CREATE TEMP TABLE kept_values AS SELECT value FROM (SELECT value, count, false AS is_new FROM vocabulary "
        f"UNION ALL SELECT value, count, true FROM new_values) ORDER BY count DESC, is_new, value LIMIT {max_rows}"
    )
    num_evicted_values = feature_column.fetch_count("SELECT count(*) FROM vocabulary ANTI JOIN kept_values USING (value)")
    for table_name in ("vocabulary", "new_values"):
        connection.execute(f"DELETE FROM {table_name} WHERE value NOT IN (SELECT value FROM kept_values)")
    connection.execute("DROP TABLE kept_values")
    return num_evicted_values


def write_vocabulary(feature_column: FeatureColumn) -> None:
    """Write <owner_kind>.<name>.vocabulary.parquet (value, count) in the order of the rows. The value of row 0 is null."""
    num_values_sql = f"SELECT count(*) FROM single_values WHERE {feature_column.counted_row_sql}"
    count_without_row_sql = f"({num_values_sql}) - (SELECT coalesce(sum(count), 0) FROM vocabulary)"
    reader = feature_column.connection.sql(
        f"SELECT value, count FROM (SELECT NULL AS value, ({count_without_row_sql})::BIGINT AS count, 0 AS row "
        "UNION ALL SELECT * FROM vocabulary) ORDER BY row"
    ).to_arrow_reader(BATCH_ROWS)
    schema = pa.schema([("value", pa.string() if feature_column.value_type == "string" else pa.int64()), ("count", pa.int64())])
    with pq.ParquetWriter(feature_column.output_folder / f"{feature_column.key}.vocabulary.parquet", schema) as writer:
        for batch in reader:
            writer.write_table(pa.Table.from_batches([batch]).cast(schema))


def write_vector_rows(feature_column: FeatureColumn, *, num_table_rows: int) -> int:
    """Write <owner_kind>.<name>.vector_row.npy: the row of the pretrained vector of each value, or -1.

    Return the number of values that have a vector.

    num_table_rows: number of rows of the feature's embedding table.
    """
    if feature_column.vector_ids_path is None:
        return 0
    vector_rows = feature_column.allocate("vector_row", dtype=np.int64, length=num_table_rows)
    vector_rows[:] = -1
    num_with_vector = 0
    vectors_sql = scan_sql(feature_column.vector_ids_path, options_sql="file_row_number = true")
    reader = feature_column.connection.sql(
        f"SELECT vocabulary.row, vectors.file_row_number AS vector_row FROM vocabulary JOIN {vectors_sql} vectors "
        "ON vocabulary.value = vectors.id"
    ).to_arrow_reader(BATCH_ROWS)
    for batch in reader:
        vector_rows[batch.column("row").to_numpy()] = batch.column("vector_row").to_numpy()
        num_with_vector += batch.num_rows
    if not num_with_vector:
        raise InputError(
            f"embeddings: none of the ids of the {feature_column.key!r} vectors is one of the feature's "
            f"{num_table_rows - 1:,} values; check that both use the same ids"
        )
    return num_with_vector
