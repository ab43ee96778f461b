"""The SqlSession of Spark. Tables and results are parquet files in a folder that the executors and this process share.

A table is written once, so the steps before it are not repeated if an executor is lost. Results are read from the files as
Arrow record batches, so neither the driver nor this process holds a whole result.
"""

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
import sqlglot
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as t
from pyspark.sql.pandas.types import to_arrow_schema

from recsys_core.errors import InputError
from recsys_core.ingest.log.spark_engine.dialect import FUNCTIONS, spark_schema
from recsys_core.parquet.duckdb_session import quoted

BATCH_ROWS = 1_000_000
_CONF = {
    "spark.sql.ansi.enabled": "false",  # dialect.py needs products of 64 bits
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.caseSensitive": "true",
    "spark.sql.legacy.parquet.nanosAsLong": "true",
    "spark.sql.parquet.filterPushdown": "false",  # wrong statistics in a file must not hide rows
    "spark.sql.orc.filterPushdown": "false",
    "spark.sql.parquet.int96RebaseModeInRead": "CORRECTED",
    "spark.sql.parquet.datetimeRebaseModeInRead": "CORRECTED",
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.files.ignoreCorruptFiles": "false",
    "spark.sql.files.ignoreMissingFiles": "false",
}
"""Properties on which the result depends."""
_READ_OPTIONS = {"__globPaths__": "false", "recursiveFileLookup": "true"}
"""With these options, a path is not a glob, and folder names such as key=value do not become columns."""
_FILE_COLUMN = "nightjar file"
_URI_START = "^file:/+"
_WRITE_OPTIONS = {"mapreduce.fileoutputcommitter.marksuccessfuljobs": "false", "compression": "lz4_raw"}


def new_session(spark: SparkSession) -> SparkSession:
    """Return a session with its own views, and with the properties on which the results depend."""
    session = spark.newSession()
    for key, value in _CONF.items():
        session.conf.set(key, value)
    return session


class SparkLogSession:
    """The SqlSession of a Spark session; see SqlSession.

    folder: folder for the tables, which all executors see. It need not exist yet.
    """

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark = new_session(spark)
        self._folder, self._unique_numbers = folder.absolute(), count()

    def fetch_rows(self, query: str) -> list[tuple[Any, ...]]:
        """Return all rows of a small result."""
        table = self._frame(query).toArrow()
        return list(zip(*(column.to_pylist() for column in table.columns), strict=True))

    def create_view(self, name: str, query: str) -> None:
        """Create or replace a temporary view."""
        self._frame(query).createOrReplaceTempView(name)

    def create_spark_view(self, name: str, spark_query: str) -> None:
        """Create or replace a temporary view of a query in Spark's dialect."""
        self.spark.sql(spark_query).createOrReplaceTempView(name)

    def create_table(self, name: str, query: str) -> None:
        """Write the rows of `query` to files, and create or replace the view `name` of these files."""
        folder = self._new_folder(name)
        frame = self._frame(query)
        self._write(frame, folder)
        self._read(folder, schema=frame.schema).createOrReplaceTempView(name)
        for old_folder in self._folder.glob(f"{name}-[0-9]*"):
            if old_folder != folder:
                shutil.rmtree(old_folder)

    def create_id_table(self, name: str, *, id_type: str) -> None:
        """Create an empty view."""
        columns_sql = f"NULL::{id_type} AS id, NULL::BIGINT AS code, NULL::BIGINT AS previous_row"
        self.create_view(name, f"SELECT * FROM (SELECT {columns_sql}) AS ids WHERE false")

    def append(self, name: str, query: str) -> None:
        """Replace the view by a view that also has the rows of `query`."""
        self.spark.table(name).unionAll(self._frame(query)).createOrReplaceTempView(name)

    def numbered(self, query: str, *, order_sql: str) -> str:
        """Sort the rows into files. The number of a row is its index in the file plus the number of rows in earlier files.

        A window function without partitions would instead sort all rows in one task.
        """
        folder = self._new_folder("numbered")
        frame = self._frame(f"SELECT * FROM ({query}) AS unordered ORDER BY {order_sql}")
        self._write(frame, folder)
        next_row, file_names, first_rows = 0, [], []
        for path in _files_in_order(folder):
            file_names.append(path.name)
            first_rows.append(next_row)
            next_row += pq.read_metadata(path).num_rows
        rows = self._read(folder, schema=frame.schema).select(
            "*", F.col("_metadata.file_name").alias("file_name"), F.col("_metadata.row_index").alias("number")
        )
        if len(file_names) > 1:
            first_row_table = self.spark.createDataFrame(pa.table({"file_name": file_names, "first_row": first_rows}))
            rows = rows.join(F.broadcast(first_row_table), "file_name").withColumn("number", F.expr("first_row + number"))
        view_name = folder.name.replace("-", "_")
        rows.select(*frame.columns, "number").createOrReplaceTempView(view_name)
        return view_name

    def column_names(self, name: str) -> list[str]:
        """Return the columns of a view."""
        return list(self.spark.table(name).columns)

    def scan_sql(self, path: Path, *, with_row_number: bool = False) -> str:
        """Create a view of the files, and return its name."""
        first_path = path if path.is_file() else _files_in_order(path)[0]
        rows = self._read(path, schema=spark_schema(pq.read_schema(first_path)))
        if with_row_number:
            rows = rows.select("*", F.col("_metadata.row_index").alias("file_row_number"))
        name = f"scan_{next(self._unique_numbers)}"
        rows.createOrReplaceTempView(name)
        return name

    def create_files_view(self, name: str, path_by_index: Mapping[int, Path], *, schema: t.StructType) -> None:
        """Create a view of input files, with the columns `file_index` and `file_row_number`."""
        paths = [f"file://{path.absolute()}" for path in path_by_index.values()]
        files = self.spark.read.options(**_READ_OPTIONS).schema(schema).parquet(*paths)
        rows = files.select(
            "*",
            F.regexp_replace("_metadata.file_path", _URI_START, "/").alias(_FILE_COLUMN),
            F.col("_metadata.row_index").alias("file_row_number"),
        )
        index_by_path = {str(path.absolute()): index for index, path in path_by_index.items()}
        encoded_paths = [re.sub(_URI_START, "/", uri) for uri in files.inputFiles()]
        if len(encoded_paths) < len(paths):
            skipped_paths = sorted(index_by_path.keys() - set(map(unquote, encoded_paths)))
            raise InputError(f"{skipped_paths[0]}: Spark skips files whose names start with _ or a point; rename it")
        file_indices = pa.array([index_by_path[unquote(path)] for path in encoded_paths], pa.int32())
        index_table = self.spark.createDataFrame(pa.table({_FILE_COLUMN: encoded_paths, "file_index": file_indices}))
        rows.join(F.broadcast(index_table), _FILE_COLUMN).drop(_FILE_COLUMN).createOrReplaceTempView(name)

    def create_tables_view(self, name: str, frame_by_index: Mapping[int, DataFrame], *, columns: Sequence[str]) -> None:
        """Create a view of tables, with the columns `file_index` and `file_row_number`, which is 0 for all rows."""
        quoted_columns = [F.col(quoted(column, quote="`")) for column in columns]
        frames = [
            frame.select(*quoted_columns, F.lit(index).alias("file_index"), F.lit(0).cast("bigint").alias("file_row_number"))
            for index, frame in frame_by_index.items()
        ]
        reduce(DataFrame.unionAll, frames).createOrReplaceTempView(name)

    def stream(self, query: str) -> Iterator[pa.RecordBatch]:
        """Write the result to files, yield their batches, and remove each file after it was read."""
        folder = self._new_folder("result")
        self._write(self._frame(query), folder)
        for path in _files_in_order(folder):
            with pq.ParquetFile(path) as file:
                yield from file.iter_batches(BATCH_ROWS)
            path.unlink()

    def write_part(self, query: str, path: Path) -> None:
        """Write a folder of parquet files."""
        self._write(self._frame(query), path)

    def write_file(self, query: str, path: Path) -> None:
        """Stream the result into one parquet file."""
        schema = to_arrow_schema(self._frame(query).schema)
        with pq.ParquetWriter(path, schema) as writer:
            for batch in self.stream(query):
                writer.write_batch(batch.cast(schema))

    def _frame(self, query: str) -> DataFrame:
        """Return the result of a query in DuckDB's dialect, which is translated to Spark's dialect."""
        for name, (signature, body_sql) in FUNCTIONS.items():
            if f"{name}(" in query:
                self.spark.sql(f"CREATE OR REPLACE TEMPORARY FUNCTION {name}{signature} RETURN {body_sql}")
        (spark_query,) = sqlglot.transpile(query, read="duckdb", write="spark")
        return self.spark.sql(spark_query)

    def _new_folder(self, name: str) -> Path:
        return self._folder / f"{name}-{next(self._unique_numbers)}"

    def _read(self, path: Path, *, schema: t.StructType) -> DataFrame:
        return self.spark.read.options(**_READ_OPTIONS).schema(schema).parquet(f"file://{path}")

    def _write(self, frame: DataFrame, folder: Path) -> None:
        frame.write.options(**_WRITE_OPTIONS).parquet(f"file://{folder.absolute()}")
        for path in folder.iterdir():
            if path.name.startswith((".", "_")):  # a checksum of Hadoop's local file system, which nightjar does not read
                path.unlink()


def _files_in_order(folder: Path) -> list[Path]:
    """Return the files of a sorted result by partition and file number: 3 and 0 in part-00003-<id>-c000.parquet."""

    def partition_and_file_number(path: Path) -> tuple[int, ...]:
        match = re.fullmatch(r"part-(\d+)-.*-c(\d+)\..*", path.name)
        assert match is not None, path
        return tuple(map(int, match.groups()))

    return sorted(folder.glob("part-*.parquet"), key=partition_and_file_number)
