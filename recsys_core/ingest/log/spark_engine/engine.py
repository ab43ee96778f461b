"""SparkEngine: the log ingest on Apache Spark. Its results are equal to the results of DuckdbEngine, bit by bit."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Self

import duckdb
import pyarrow as pa
import pyspark

from recsys_core.errors import InputError
from recsys_core.ingest.log.config import InteractionsConfig
from recsys_core.ingest.log.duckdb_engine.read_errors import reject_unreadable_files
from recsys_core.ingest.log.engine import FileStatistics, LogCounts, LogFiles
from recsys_core.ingest.log.engine_settings import SparkSettings
from recsys_core.ingest.log.spark_engine.cluster import SPARK_ERRORS, open_spark, reject_unreadable_file, spark_message
from recsys_core.ingest.log.spark_engine.raw_log import create_raw
from recsys_core.ingest.log.spark_engine.session import SparkLogSession
from recsys_core.ingest.log.split_config import FileSplit
from recsys_core.ingest.log.sql.engine import SqlEngine
from recsys_core.manifests import IdType, InteractionsManifest, LogPart, SourceFile

_CONTEXT_TYPES_FILE = "_context.arrow"
"""File of a part with the types of its context columns. Spark ignores files whose name starts with an underscore."""


class SparkEngine(SqlEngine):
    """The LogEngine that runs on Spark. A part is a folder of parquet files, which the executors write."""

    version = f"spark {pyspark.__version__}"
    _session: SparkLogSession
    _context_schema = pa.schema([])

    @classmethod
    @contextmanager
    def open(
        cls,
        config: InteractionsConfig,
        *,
        id_types: Mapping[str, IdType],
        continued_manifest: InteractionsManifest | None,
        spill_folder: Path,
    ) -> Iterator[Self]:
        """Use the Spark session of the process, or start one; see LogEngine."""
        assert isinstance(config.engine, SparkSettings)
        with open_spark(config.engine, scratch_folder=spill_folder) as spark:
            session = SparkLogSession(spark, spill_folder)
            yield cls(session, config, id_types=id_types, continued_manifest=continued_manifest)

    def read_part(self, files: LogFiles, *, part_path: Path) -> Sequence[FileStatistics]:
        """Read the files, and store the types of the context columns, because Spark has fewer; see LogEngine."""
        statistics = super().read_part(files, part_path=part_path)
        (part_path / _CONTEXT_TYPES_FILE).write_bytes(self._context_schema.serialize())
        return statistics

    def load(self, parts: Sequence[LogPart], *, folder: Path, split_code_by_file: Mapping[SourceFile, int]) -> LogCounts:
        """Create `log`; see LogEngine."""
        if self._config.context_columns:
            current_parts = [part for part in parts if any(file.source in split_code_by_file for file in part.files)]
            schemas = [
                pa.ipc.read_schema(pa.py_buffer((folder / part.file_name / _CONTEXT_TYPES_FILE).read_bytes()))
                for part in current_parts
            ]
            _require_one_time_unit(self._config, schemas)
            self._context_schema = _common_schema(schemas)
        return super().load(parts, folder=folder, split_code_by_file=split_code_by_file)

    def sorted_events(self) -> Iterator[pa.RecordBatch]:
        """Sort `log`, and stream its rows with the types that DuckDB would return; see LogEngine."""
        for batch in super().sorted_events():
            yield _cast_columns(batch, self._context_schema)

    def _create_raw(self, files: LogFiles) -> None:
        self._context_schema = create_raw(self._session, self._config, files)

    @contextmanager
    def _explain_read_errors(self, files: LogFiles) -> Iterator[None]:
        try:
            yield
        except SPARK_ERRORS as error:
            message = str(error)
            if files.sources[0].table is not None:
                reject_unreadable_file(error)
            elif "FileNotFoundException" in message or "FAILED_READ_FILE" in message:
                file_indices = [index for index, path in enumerate(files.paths) if path.name in message]
                file_indices = file_indices or list(range(len(files.paths)))
                sources, paths = (
                    [files.sources[index] for index in file_indices],
                    [files.paths[index] for index in file_indices],
                )
                if "FileNotFoundException" in message and all(path.exists() for path in paths):
                    raise InputError(
                        f"{sources[0].name}: the executors do not see this file, but this host does; put the log on storage "
                        "that is mounted at the same path on all hosts"
                    ) from error
                reject_unreadable_files(self._config, replace(files, sources=sources, paths=paths))
                raise InputError(f"{sources[0].name}: Spark cannot read it: {spark_message(error)}") from error
            raise

    def _id_condition_sql(self, side: str, *, id_sql: str) -> str:
        return f"{id_sql} = {side[0]}.id"

    def _draw_sql(self, split: FileSplit) -> str:
        if split.validation_unit == "pair":
            return 'pair_draw(raw."user"::VARCHAR, raw.item::VARCHAR)'
        return "item_draw(raw.item::VARCHAR)"

    def _ignore_file_statistics(self) -> None:
        """Do nothing: the session never uses the statistics."""


def _require_one_time_unit(config: InteractionsConfig, schemas: Sequence[pa.Schema]) -> None:
    """Raise InputError if a context column has nanoseconds, which Spark reads as integers, in some parts only."""
    for column, data_types in zip(
        config.context_columns, zip(*(schema.types for schema in schemas), strict=True), strict=False
    ):
        nanosecond_flags = {data_type.unit == "ns" for data_type in data_types if pa.types.is_timestamp(data_type)}
        if len(nanosecond_flags) > 1:
            raise InputError(
                f"interactions.context_columns: column {column!r} is {data_types[-1]} in new files, but {data_types[0]} in "
                "files of earlier runs, which Spark cannot combine; set interactions.vocabulary.rebuild to always for one "
                "run, which reads all files again"
            )


def _common_schema(schemas: Sequence[pa.Schema]) -> pa.Schema:
    """Return the schema that DuckDB gives to the union of tables with these schemas."""
    if all(schema == schemas[0] for schema in schemas):
        return schemas[0] if schemas else pa.schema([])
    with duckdb.connect() as connection:
        for index, schema in enumerate(schemas):
            connection.register(f"part_{index}", schema.empty_table())
        union_sql = " UNION ALL ".join(f"SELECT * FROM part_{index}" for index in range(len(schemas)))
        return connection.sql(union_sql).to_arrow_table().schema


def _cast_columns(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Cast each column of `batch` that is also in `schema` to its type in `schema`."""
    columns = [
        column.cast(schema.field(name).type) if name in schema.names else column
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, batch.schema.names)
