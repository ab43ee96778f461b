"""Vocabulary of a categorical feature: table `vocabulary` (value, count, row), its file, and the vectors of its values.

Row 0 is for values that have no row of their own.
"""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recsys_core.data.features.feature_column import BATCH_ROWS, FeatureColumn
from recsys_core.errors import InputError
from recsys_core.parquet.duckdb_session import SQL_TYPE, scan_sql


def create_vocabulary(feature_column: FeatureColumn) -> int:
    """Create table `vocabulary` from the view `single_values` (see encoding.py); return the number of new values.

    The values of the previous run keep their rows. New values follow by decreasing count, then by value.
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
        f"INSERT INTO vocabulary SELECT value, count, {num_previous_values} + row_number() OVER (ORDER BY count DESC, value) "
        "FROM (SELECT * FROM value_counts ANTI JOIN vocabulary USING (value)) "
        f"WHERE count >= {feature_column.feature.min_count}"
    )
    connection.execute("DROP TABLE value_counts")
    return feature_column.fetch_count("SELECT count(*) FROM vocabulary") - num_previous_values


def write_vocabulary(feature_column: FeatureColumn) -> None:
    """Write <side>.<name>.vocabulary.parquet (value, count), in the order of the rows; row 0 has value null."""
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
    """Write <side>.<name>.vector_row.npy: for each row, the index of the pretrained vector of its value, or -1.

    Return the number of values that have a vector.
    """
    if feature_column.vector_ids_path is None:
        return 0
    vector_row_R = feature_column.allocate("vector_row", dtype=np.int64, length=num_table_rows)
    vector_row_R[:] = -1
    num_with_vector = 0
    vectors_sql = scan_sql(feature_column.vector_ids_path, options_sql="file_row_number = true")
    reader = feature_column.connection.sql(
        f"SELECT vocabulary.row, vectors.file_row_number AS vector_row FROM vocabulary JOIN {vectors_sql} vectors "
        "ON vocabulary.value = vectors.id"
    ).to_arrow_reader(BATCH_ROWS)
    for batch in reader:
        vector_row_R[batch.column("row").to_numpy()] = batch.column("vector_row").to_numpy()
        num_with_vector += batch.num_rows
    if not num_with_vector:
        raise InputError(
            f"embeddings: none of the ids of the {feature_column.key!r} vectors is one of the feature's "
            f"{num_table_rows - 1:,} values; check that both use the same ids"
        )
    return num_with_vector
