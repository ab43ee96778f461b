"""Ingest of Spark tables, compared with DuckDB on parquet files with the same rows.

The ORC tables are real. Delta and Iceberg need a connector, so a stub session executes the statements for these formats.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.engines import differences
from recsys_core.ingest.first_row_group import check_time_unit
from recsys_core.ingest.log import incremental
from recsys_core.ingest.log.config import InteractionsConfig
from recsys_core.ingest.log.engine_settings import SparkSettings
from recsys_core.ingest.log.log_schema import open_interactions
from recsys_core.manifests import InteractionsManifest
from recsys_core.units import DAY_US
from tests.recsys_core.ingest.interaction_logs import ingest
from tests.recsys_core.ingest.parquet_files import assert_rejects, raises_input_error
from tests.recsys_core.ingest.spark_sessions import SPARK_SETTINGS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.usefixtures("spark")
TIME_SPLIT: dict[str, Any] = {"split": {"kind": "time"}}
COLUMN_SETTINGS: dict[str, Any] = {
    "label_column": "stars",
    "label_threshold": 1,
    "weight_column": "weight",
    "context_columns": ("day", "shop"),
}
ORC_SETTINGS: dict[str, Any] = {"format": "orc", "engine": SPARK_SETTINGS}
START_US = 1_700_000_000_000_000
UNEQUAL_FIELDS = ["fingerprint", "lineage", "sources", "parts"]
"""Fields of the manifest that depend on the input files, and therefore differ between a table and a parquet file."""


@pytest.fixture
def session() -> "SparkSession":
    """Return the Spark session of this process."""
    from pyspark.sql import SparkSession

    session = SparkSession.getActiveSession()
    assert session is not None
    return session


def random_events(seed: int = 0, *, num_rows: int = 400) -> pa.Table:
    """Return events of three days, in the column day: 0, 1 or 2."""
    rng = np.random.default_rng(seed)
    day = rng.integers(0, 3, num_rows)
    times = pa.array(START_US + day * 4 * DAY_US + rng.integers(0, DAY_US, num_rows), pa.timestamp("us", "UTC"))
    columns = {"user_id": np.char.add("ü", rng.integers(0, 40, num_rows).astype(str)), "item_id": rng.integers(0, 20, num_rows)}
    columns |= {"t": times, "stars": rng.integers(0, 5, num_rows), "weight": rng.random(num_rows).astype(np.float32)}
    columns |= {
        "shop": pa.array(rng.choice(["a", "b"], num_rows), mask=rng.random(num_rows) < 0.1),
        "unused": [{"k": 1}] * num_rows,
    }
    return pa.table(columns | {"day": day.astype(np.int32)})


def write_orc(session: "SparkSession", folder: Path, table: pa.Table, *, mode: str = "overwrite") -> str:
    """Write an ORC table with one folder per day, and a parquet file with the same rows. Return the folder of the table."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path := folder.with_suffix(".parquet"))
    session.read.parquet(f"file://{path}").write.partitionBy("day").mode(mode).orc(f"file://{folder}")
    return str(folder)


def test_an_orc_table_has_the_store_of_the_same_rows_in_parquet(tmp_path: Path, session: "SparkSession") -> None:
    path = write_orc(session, tmp_path / "log", random_events())
    duckdb_manifest = ingest(tmp_path / "duckdb", f"{path}.parquet", **TIME_SPLIT, **COLUMN_SETTINGS)
    spark_manifest = ingest(tmp_path / "spark", path, **TIME_SPLIT, **COLUMN_SETTINGS, **ORC_SETTINGS)
    assert differences(duckdb_manifest, spark_manifest) == UNEQUAL_FIELDS
    assert spark_manifest.sources[0].path == path and spark_manifest.sources[0].num_rows == 400
    assert spark_manifest.parts[0].files[0].spans == duckdb_manifest.parts[0].files[0].spans


def test_the_splits_can_be_tables_of_a_catalog(tmp_path: Path, session: "SparkSession") -> None:
    table_name_by_split = {}
    for seed, split in enumerate(("train", "test")):
        write_orc(session, tmp_path / split, random_events(seed))
        table_name_by_split[split] = f"nightjar_{split}"
        session.read.orc(f"file://{tmp_path / split}").write.format("orc").option(
            "path", f"file://{tmp_path / table_name_by_split[split]}"
        ).mode("overwrite").saveAsTable(table_name_by_split[split])
    settings: dict[str, Any] = {
        "split": {"kind": "files", "test_paths": str(tmp_path / "test.parquet"), "validation_share": 0.2}
    }
    duckdb_manifest = ingest(tmp_path / "duckdb", str(tmp_path / "train.parquet"), **settings)
    settings["split"] |= {"test_paths": table_name_by_split["test"]}
    spark_manifest = ingest(tmp_path / "spark", table_name_by_split["train"], **settings, **ORC_SETTINGS)
    for name in table_name_by_split.values():
        session.sql(f"DROP TABLE {name}")
    assert differences(duckdb_manifest, spark_manifest) == UNEQUAL_FIELDS


def test_a_table_is_read_again_only_if_it_changed_and_ids_keep_their_rows(tmp_path: Path, session: "SparkSession") -> None:
    old_path, new_path = (
        write_orc(session, tmp_path / "log" / name, random_events(seed)) for seed, name in enumerate(("old", "new"))
    )

    def ingest_with_both(
        run_name: str, previous: dict[str, InteractionsManifest] | None = None
    ) -> dict[str, InteractionsManifest]:
        paths = {"duckdb": [f"{old_path}.parquet", f"{new_path}.parquet"], "spark": [old_path, new_path]}
        return {
            kind: ingest(
                tmp_path / run_name / kind, *paths[kind], previous=previous and previous[kind], **TIME_SPLIT, **settings
            )
            for kind, settings in {"duckdb": {}, "spark": ORC_SETTINGS}.items()
        }

    first_manifest_by_engine = ingest_with_both("first")
    assert [manifest.num_files_read for manifest in ingest_with_both("same", first_manifest_by_engine).values()] == [0, 0]
    extended_events = pa.concat_tables([random_events(1), random_events(7, num_rows=100)])
    write_orc(session, tmp_path / "log" / "new", extended_events)
    second_manifest_by_engine = ingest_with_both("second", first_manifest_by_engine)
    spark_manifest = second_manifest_by_engine["spark"]
    assert (spark_manifest.num_files_read, spark_manifest.num_rows_read, len(spark_manifest.parts)) == (1, 500, 2)
    assert differences(*second_manifest_by_engine.values()) == [
        "fingerprint",
        "lineage",
        "continued_fingerprint",
        "sources",
        "parts",
    ]


BAD_ROW_BY_FAULT: dict[str, tuple[dict[str, Any], str]] = {
    "null": ({"user_id": None}, "column 'user_id': null, in a row with user null and item 3 (1 of 401 rows)"),
    "future": ({"t": 4 * 10**15}, "column 't': 2096-10-02 07:06:40+00:00 is in the future, in a row with user 'u' and item 3"),
    "weight": ({"weight": -1.0}, "column 'weight': -1.0 is negative, in a row with user 'u' and item 3 (1 of 401 rows)"),
}


@pytest.mark.parametrize("fault", BAD_ROW_BY_FAULT)
def test_the_error_names_the_ids_of_a_bad_row(tmp_path: Path, session: "SparkSession", fault: str) -> None:
    bad_values, message = BAD_ROW_BY_FAULT[fault]
    row: dict[str, Any] = {"user_id": "u", "item_id": 3, "t": START_US, "stars": 3, "weight": 1.0}
    row |= {"shop": "a", "unused": {"k": 1}, "day": 0} | bad_values
    schema = random_events().schema
    bad_row = pa.table({field.name: pa.array([row[field.name]]).cast(field.type) for field in schema})
    path = write_orc(session, tmp_path / "log", pa.concat_tables([random_events(), bad_row]))
    settings = TIME_SPLIT | COLUMN_SETTINGS | ORC_SETTINGS
    assert_rejects(
        lambda folder: ingest(folder, path, **settings), tmp_path, f"{path}: {message}", "interactions.on_bad_rows to drop"
    )


def test_the_error_names_a_damaged_file_of_a_table(tmp_path: Path, session: "SparkSession") -> None:
    path = write_orc(session, tmp_path / "log", random_events())
    damaged_path = sorted(Path(path).glob("day=1/*.orc"))[0]
    content = bytearray(damaged_path.read_bytes())
    content[3 : len(content) // 2] = b"\xff" * (len(content) // 2 - 3)
    damaged_path.write_bytes(content)
    for checksum_path in Path(path).glob("day=1/.*.crc"):  # with these files, Hadoop would find the damage before Spark
        checksum_path.unlink()
    assert_rejects(
        lambda folder: ingest(folder, path, **TIME_SPLIT, **ORC_SETTINGS), tmp_path, damaged_path.name, "Spark cannot read it"
    )


def test_a_table_that_changes_between_the_checks_and_the_reading_is_rejected(
    tmp_path: Path, session: "SparkSession", monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_orc(session, tmp_path / "log", random_events())
    read_part = incremental.read_part

    def append_and_read(*arguments: Any, **options: Any) -> Any:
        write_orc(session, tmp_path / "log", random_events(1), mode="append")
        return read_part(*arguments, **options)

    monkeypatch.setattr(incremental, "read_part", append_and_read)
    assert_rejects(
        lambda folder: ingest(folder, path, **TIME_SPLIT, **ORC_SETTINGS), tmp_path, f"{path}: changed while it was being read"
    )


def test_times_in_a_wrong_unit_are_rejected(tmp_path: Path, session: "SparkSession") -> None:
    events = random_events()
    times = pa.array(np.full(len(events), START_US // 1_000_000))
    path = write_orc(session, tmp_path / "log", events.set_column(2, "t", times))
    config = InteractionsConfig.model_validate({"paths": path, "timestamp_column": "t", "timestamp_unit": "ms"} | ORC_SETTINGS)
    with raises_input_error(f"{path}: column 't': 1700000000 is 1970-01-20 in ms", "set interactions.timestamp_unit to s"):
        check_time_unit(config, open_interactions(config).sources)


@pytest.mark.parametrize(
    ("settings", "paths", "message_parts"),
    [
        ({"format": "delta"}, ["./log"], ["format is delta, but Spark has no connector that reads ./log", "delta-spark_2.13"]),
        ({"format": "iceberg"}, ["lake.shop.log"], ["format is iceberg, but Spark has no connector", "iceberg-spark-runtime"]),
        ({}, ["./none"], ["interactions.paths: ./none: Spark cannot open this orc table: [PATH_NOT_FOUND]"]),
        ({}, ["shop_log"], ["interactions.paths: shop_log: Spark cannot open this orc table: [TABLE_OR_VIEW_NOT_FOUND]"]),
        ({}, ["./log", "./log"], ["./log is also in interactions.paths, and its rows would count twice"]),
        ({}, ["s3://b/log", "s3://b/log/"], ["s3://b/log/ is also in interactions.paths, and its rows would count twice"]),
    ],
)
def test_tables_that_cannot_be_opened_or_are_listed_twice_are_rejected(
    tmp_path: Path, settings: dict[str, Any], paths: list[str], message_parts: list[str]
) -> None:
    assert_rejects(lambda folder: ingest(folder, *paths, **TIME_SPLIT, **(ORC_SETTINGS | settings)), tmp_path, *message_parts)


def test_an_empty_table_and_a_table_outside_of_the_data_root_are_rejected(tmp_path: Path, session: "SparkSession") -> None:
    session.sql("SELECT 'u' AS user_id, 3 AS item_id, now() AS t").limit(0).write.orc(path := f"{tmp_path}/log")
    config = InteractionsConfig.model_validate({"paths": path, "timestamp_column": "t"} | ORC_SETTINGS)
    with raises_input_error(f"{path}: no rows"):
        open_interactions(config)
    with raises_input_error(f"{path}: is not a folder below allowed_data_root ({tmp_path}/other)"):
        open_interactions(config, allowed_data_root=tmp_path / "other")


class StubSession:
    """Stub of a session with a connector. It executes only the statements of `frame_by_statement`."""

    def __init__(self, frame_by_statement: dict[str, "Callable[[], DataFrame]"]) -> None:
        self._frame_by_statement = frame_by_statement

    def sql(self, statement: str) -> "DataFrame":
        return self._frame_by_statement[statement]()


@pytest.mark.parametrize(
    ("table_format", "path", "identifier", "version_statement"),
    [
        ("delta", "/lake/a`b", "delta.`file:///lake/a``b`", "DESCRIBE HISTORY delta.`file:///lake/a``b` LIMIT 1"),
        ("delta", "shop.log", "`shop`.`log`", "DESCRIBE HISTORY `shop`.`log` LIMIT 1"),
        (
            "iceberg",
            "lake.shop.log",
            "`lake`.`shop`.`log`",
            "SELECT snapshot_id FROM `lake`.`shop`.`log`.refs WHERE name = 'main'",
        ),
    ],
)
def test_a_table_is_read_at_the_version_in_its_path_or_at_its_newest_version(
    session: "SparkSession",
    monkeypatch: pytest.MonkeyPatch,
    table_format: Any,
    path: str,
    identifier: str,
    version_statement: str,
) -> None:
    from recsys_core.ingest.log.spark_engine import tables

    frame_by_statement = {version_statement: lambda: session.sql("SELECT 8L AS version")}
    frame_by_statement |= {
        f"SELECT * FROM {identifier} VERSION AS OF {version}": lambda version=version: session.range(version).toDF("user_id")
        for version in (3, 8)
    }
    monkeypatch.setattr(tables, "new_session", lambda _: StubSession(frame_by_statement))

    def open_table(table_name: str) -> Any:
        settings = SparkSettings.model_validate(SPARK_SETTINGS)
        ((source,),) = tables.open_tables(
            settings, table_format, {"interactions.paths": [table_name]}, columns=["user_id"], allowed_data_root=None
        )
        return source

    source, old_source = open_table(path), open_table(f"{path}@v3")
    assert [source.name, old_source.name] == [f"{path}@v8", f"{path}@v3"]
    assert [source.record.num_rows, old_source.record.num_rows] == [8, 3] and source.record != old_source.record
    assert open_table(path).record == source.record and open_table(f"{path}@v8").record == source.record
    assert tables.table_frame(StubSession(frame_by_statement), old_source).count() == 3  # type: ignore[arg-type]
