"""Tables that Spark reads: Delta, Iceberg and ORC tables, each at one version.

A version identifies the rows of a table. While it stays the same, later runs reuse the stored events of the table. The version
of an ORC table is a hash of the paths, sizes and times of its files.
"""

import hashlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from recsys_core.config import is_uri
from recsys_core.errors import InputError, printable
from recsys_core.ingest.log.engine_settings import SparkSettings, TableFormat, is_table_name, split_version
from recsys_core.ingest.log.spark_engine.cluster import SPARK_ERRORS, open_spark, reject_unreadable_file, spark_message
from recsys_core.ingest.log.spark_engine.session import new_session
from recsys_core.manifests import SourceFile
from recsys_core.parquet.duckdb_session import quoted
from recsys_core.parquet.locations import Location
from recsys_core.parquet.sources import Source, Table, open_stage_file

_MAX_FIRST_ROWS = 65_536
_CONNECTOR_PROPERTIES = {
    "delta": "spark.jars.packages: io.delta:delta-spark_2.13:<version>, spark.sql.extensions: "
    "io.delta.sql.DeltaSparkSessionExtension, and spark.sql.catalog.spark_catalog: "
    "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    "iceberg": "spark.jars.packages: org.apache.iceberg:iceberg-spark-runtime-4.0_2.13:<version>, and the catalog of the table "
    "with spark.sql.catalog.<catalog>: org.apache.iceberg.spark.SparkCatalog",
}
"""Properties that the connector of a format needs, for messages. ORC needs none."""
_NO_CONNECTOR_MARKERS = (
    "PARSE_SYNTAX_ERROR",  # only Delta has the statement DESCRIBE HISTORY
    "REQUIRES_SINGLE_PART_NAMESPACE",  # no catalog has the name
    "Cannot find catalog plugin class",
    "DATA_SOURCE_NOT_FOUND",
    "NoClassDefFoundError",
    "NoSuchMethodError",  # the connector is for another version of Spark
)


def open_tables(
    settings: SparkSettings,
    table_format: TableFormat,
    paths_by_setting: Mapping[str, Sequence[str]],
    *,
    columns: Sequence[str],
    allowed_data_root: Path | None,
) -> list[tuple[Source, ...]]:
    """Open the tables of each setting at their newest version, or at the version that a path names.

    Args:
        paths_by_setting: paths and names of tables, by config key.
        columns: columns that the ingest reads. All other columns are null in the first rows that a Source contains.
        allowed_data_root: folder that has to contain every table.

    Raises:
        InputError: Spark has no connector for the format. A table does not exist, has no version or no files, is listed twice,
            or is outside of allowed_data_root. All tables of a setting are empty.
    """
    setting_by_table: dict[str, str] = {}
    for setting, paths in paths_by_setting.items():
        for name, _ in map(split_version, paths):
            _require_below_root(name, setting=setting, allowed_data_root=allowed_data_root)
            name_without_slash = name.rstrip("/")
            if name_without_slash in setting_by_table:
                raise InputError(
                    f"{setting}: {printable(name)} is also in {setting_by_table[name_without_slash]}, and its rows would count "
                    "twice; list it once"
                )
            setting_by_table[name_without_slash] = setting
    with (
        tempfile.TemporaryDirectory(prefix="nightjar-tables-") as folder,
        open_spark(settings, scratch_folder=Path(folder), must_be_shared=False) as spark,
    ):
        session = new_session(spark)
        sources_per_setting = [
            tuple(_open_table(session, table_format, path, columns, setting=setting) for path in paths)
            for setting, paths in paths_by_setting.items()
        ]
    for setting, sources in zip(paths_by_setting, sources_per_setting, strict=True):
        if not any(source.record.num_rows for source in sources):
            raise InputError(f"{setting}: {sources[0].name}: no rows; check the job that writes this table")
    return sources_per_setting


def _require_below_root(name: str, *, setting: str, allowed_data_root: Path | None) -> None:
    if allowed_data_root is None:
        return
    is_inside = not (is_table_name(name) or is_uri(name)) and Path(name).resolve().is_relative_to(allowed_data_root.resolve())
    if not is_inside:
        raise InputError(
            f"{setting}: {printable(name)}: is not a folder below allowed_data_root ({allowed_data_root}); move the table "
            "there, or change allowed_data_root"
        )


def _open_table(spark: SparkSession, table_format: TableFormat, path: str, columns: Sequence[str], *, setting: str) -> Source:
    name, version = split_version(path)
    with _explain_errors(table_format, name, setting=setting):
        # This query detects a missing connector, so it runs even if `path` names a version.
        newest_version = _newest_version(spark, table_format, name)
        if newest_version is None:
            raise InputError(f"{setting}: {printable(name)}: no rows; check the job that writes this table")
        version = version or newest_version
        frame = _frame_at_version(spark, table_format, name, version)
        num_rows = frame.count()
        first_rows = _first_rows(frame, columns)
    shown_name = printable(name if table_format == "orc" else f"{name}@v{version}")
    with tempfile.TemporaryDirectory(prefix="nightjar-table-") as folder:
        first_rows_path = Path(folder) / "first_rows.parquet"
        pq.write_table(first_rows, first_rows_path)
        footer, first_rows_content = open_stage_file(first_rows_path).footer, first_rows_path.read_bytes()
    # A table has no footer. This hash identifies its rows instead.
    sha256 = hashlib.sha256(f"{table_format} {version}".encode()).hexdigest()
    return Source(
        Location(shown_name, name, 0, 0, pafs.LocalFileSystem()),
        footer,
        SourceFile(path=shown_name, size_bytes=0, num_rows=num_rows, modified_ns=0, footer_sha256=sha256),
        table=Table(table_format, name, version, first_rows_content),
    )


def table_frame(spark: SparkSession, source: Source) -> DataFrame:
    """Return the rows of a table at the version that was opened. Raise InputError if the files of an ORC table changed."""
    table = source.table
    assert table is not None
    if table.format == "orc" and _newest_version(spark, "orc", table.name) != table.version:
        raise InputError(f"{source.name}: changed while it was being read; run again after its writer has finished")
    return _frame_at_version(spark, table.format, table.name, table.version)


def _frame_at_version(spark: SparkSession, table_format: str, name: str, version: str) -> DataFrame:
    """Return the rows of a table. `version` is ignored for an ORC table, which has only its current files."""
    if table_format == "orc":
        return spark.table(_identifier("orc", name)) if is_table_name(name) else spark.read.orc(_as_uri(name))
    return spark.sql(f"SELECT * FROM {_identifier(table_format, name)} VERSION AS OF {version}")


def _newest_version(spark: SparkSession, table_format: str, name: str) -> str | None:
    """Return the newest version of the table; None if the table has no version or no files."""
    if table_format == "orc":
        return _hash_of_files(spark, _frame_at_version(spark, "orc", name, ""))
    identifier = _identifier(table_format, name)
    if table_format == "delta":
        version_frame = spark.sql(f"DESCRIBE HISTORY {identifier} LIMIT 1").select("version")
    else:
        version_frame = spark.sql(f"SELECT snapshot_id FROM {identifier}.refs WHERE name = 'main'")
    versions = version_frame.toArrow().column(0).to_pylist()
    return str(versions[0]) if versions else None


def _hash_of_files(spark: SparkSession, frame: DataFrame) -> str | None:
    """Return a hash of the paths, sizes and times of the files of a table; None if it has no files."""
    if not frame.inputFiles():
        return None
    # The reader of binary files lists them without reading their content.
    files = spark.read.option("__globPaths__", "false").format("binaryFile").load(frame.inputFiles())
    listing = files.select("path", "length", "modificationTime").toArrow().sort_by("path")
    return hashlib.sha256("\n".join(map(str, listing.to_pylist())).encode()).hexdigest()


def _first_rows(frame: DataFrame, columns: Sequence[str]) -> pa.Table:
    """Return the first rows with all columns. Columns other than `columns` are null, because Arrow may lack their type."""
    needed_columns = [column for column in dict.fromkeys(columns) if column in frame.columns]
    table = frame.select([F.col(quoted(column, quote="`")) for column in needed_columns]).limit(_MAX_FIRST_ROWS).toArrow()
    for column in frame.columns:
        if column not in needed_columns:
            table = table.append_column(column, pa.nulls(len(table)))
    return table


def _identifier(table_format: str, name: str) -> str:
    if is_table_name(name):
        return ".".join(quoted(part, quote="`") for part in name.split("."))
    return f"{table_format}.{quoted(_as_uri(name), quote='`')}"


def _as_uri(path: str) -> str:
    return path if is_uri(path) else f"file://{Path(path).absolute()}"


@contextmanager
def _explain_errors(table_format: TableFormat, name: str, *, setting: str) -> Iterator[None]:
    try:
        yield
    except SPARK_ERRORS as error:
        reject_unreadable_file(error)
        message = str(error)
        if table_format != "orc" and any(marker in message for marker in _NO_CONNECTOR_MARKERS):
            raise InputError(
                f"interactions.format is {table_format}, but Spark has no connector that reads {printable(name)} "
                f"({spark_message(error)}); set interactions.engine.conf to {_CONNECTOR_PROPERTIES[table_format]}"
            ) from error
        if not isinstance(error, PySparkException):  # a job failed, or a catalog does not answer
            raise
        raise InputError(
            f"{setting}: {printable(name)}: Spark cannot open this {table_format} table: {spark_message(error)}; check its "
            "path or name, and interactions.format"
        ) from error
