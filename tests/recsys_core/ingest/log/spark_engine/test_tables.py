"""Tables of Spark become the store that DuckDB makes of the same rows in parquet files.

ORC tables are read for real. Spark has no connector for Delta and Iceberg here, so their statements are answered by a stub.
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
from tests.recsys_core.ingest.parquet_files import assert_rejects, input_error
from tests.recsys_core.ingest.spark_sessions import SPARK

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.usefixtures("spark")
TIME_SPLIT: dict[str, Any] = {"split": {"kind": "time"}}
LABELS: dict[str, Any] = {"label_column": "x", "label_threshold": 1, "weight_column": "w", "context_columns": ("day", "c")}
ORC: dict[str, Any] = {"format": "orc", "engine": SPARK}
START_US = 1_700_000_000_000_000
UNEQUAL = ["fingerprint", "lineage", "sources", "parts"]
"""Fields of the manifest that name the input."""


@pytest.fixture
def session() -> "SparkSession":
    from pyspark.sql import SparkSession

    session = SparkSession.getActiveSession()
    assert session is not None
    return session


def events(seed: int = 0, *, num_rows: int = 400) -> pa.Table:
    rng = np.random.default_rng(seed)
    day = rng.integers(0, 3, num_rows)
    time = pa.array(START_US + day * 4 * DAY_US + rng.integers(0, DAY_US, num_rows), pa.timestamp("us", "UTC"))
    columns = {"user_id": np.char.add("ü", rng.integers(0, 40, num_rows).astype(str)), "item_id": rng.integers(0, 20, num_rows)}
    columns |= {"t": time, "x": rng.integers(0, 5, num_rows), "w": rng.random(num_rows).astype(np.float32)}
    columns |= {
        "c": pa.array(rng.choice(["a", "b"], num_rows), mask=rng.random(num_rows) < 0.1),
        "unused": [{"k": 1}] * num_rows,
    }
    return pa.table(columns | {"day": day.astype(np.int32)})


def write_orc(session: "SparkSession", folder: Path, table: pa.Table, *, mode: str = "overwrite") -> str:
    """Write an ORC table with one folder for each day, and a parquet file of the same rows."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path := folder.with_suffix(".parquet"))
    session.read.parquet(f"file://{path}").write.partitionBy("day").mode(mode).orc(f"file://{folder}")
    return str(folder)


def test_an_orc_table_has_the_store_of_the_same_rows_in_parquet(tmp_path: Path, session: "SparkSession") -> None:
    path = write_orc(session, tmp_path / "log", events())
    on_duckdb = ingest(tmp_path / "duckdb", f"{path}.parquet", **TIME_SPLIT, **LABELS)
    on_spark = ingest(tmp_path / "spark", path, **TIME_SPLIT, **LABELS, **ORC)
    assert differences(on_duckdb, on_spark) == UNEQUAL
    assert on_spark.sources[0].path == path and on_spark.sources[0].num_rows == 400
    assert on_spark.parts[0].files[0].spans == on_duckdb.parts[0].files[0].spans


def test_tables_of_a_catalog_can_be_the_splits(tmp_path: Path, session: "SparkSession") -> None:
    names = {}
    for seed, split in enumerate(("train", "test")):
        write_orc(session, tmp_path / split, events(seed))
        names[split] = f"nightjar_{split}"
        session.read.orc(f"file://{tmp_path / split}").write.format("orc").option(
            "path", f"file://{tmp_path / names[split]}"
        ).mode("overwrite").saveAsTable(names[split])
    settings: dict[str, Any] = {
        "split": {"kind": "files", "test_paths": str(tmp_path / "test.parquet"), "validation_share": 0.2}
    }
    on_duckdb = ingest(tmp_path / "duckdb", str(tmp_path / "train.parquet"), **settings)
    settings["split"] |= {"test_paths": names["test"]}
    on_spark = ingest(tmp_path / "spark", names["train"], **settings, **ORC)
    for name in names.values():
        session.sql(f"DROP TABLE {name}")
    assert differences(on_duckdb, on_spark) == UNEQUAL


def test_a_table_is_read_again_only_if_it_changed_and_ids_keep_their_rows(tmp_path: Path, session: "SparkSession") -> None:
    old, new = (write_orc(session, tmp_path / "log" / name, events(seed)) for seed, name in enumerate(("old", "new")))

    def run(name: str, previous: dict[str, InteractionsManifest] | None = None) -> dict[str, InteractionsManifest]:
        paths = {"duckdb": [f"{old}.parquet", f"{new}.parquet"], "spark": [old, new]}
        return {
            kind: ingest(tmp_path / name / kind, *paths[kind], previous=previous and previous[kind], **TIME_SPLIT, **settings)
            for kind, settings in {"duckdb": {}, "spark": ORC}.items()
        }

    first = run("first")
    assert [manifest.num_files_read for manifest in run("same", first).values()] == [0, 0]
    more = pa.concat_tables([events(1), events(7, num_rows=100)])
    write_orc(session, tmp_path / "log" / "new", more)
    second = run("second", first)
    assert (second["spark"].num_files_read, second["spark"].num_rows_read, len(second["spark"].parts)) == (1, 500, 2)
    assert differences(*second.values()) == ["fingerprint", "lineage", "continued_fingerprint", "sources", "parts"]


BAD_ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "null": ({"user_id": None}, "column 'user_id': null, in a row with user null and item 3 (1 of 401 rows)"),
    "future": ({"t": 4 * 10**15}, "column 't': 2096-10-02 07:06:40+00:00 is in the future, in a row with user 'u' and item 3"),
    "weight": ({"w": -1.0}, "column 'w': -1.0 is negative, in a row with user 'u' and item 3 (1 of 401 rows)"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_is_named_by_its_ids(tmp_path: Path, session: "SparkSession", name: str) -> None:
    values, message = BAD_ROWS[name]
    row = {"user_id": "u", "item_id": 3, "t": START_US, "x": 3, "w": 1.0, "c": "a", "unused": {"k": 1}, "day": 0} | values
    schema = events().schema
    bad = pa.table({field.name: pa.array([row[field.name]]).cast(field.type) for field in schema})
    path = write_orc(session, tmp_path / "log", pa.concat_tables([events(), bad]))
    settings = TIME_SPLIT | LABELS | ORC
    assert_rejects(
        lambda folder: ingest(folder, path, **settings), tmp_path, f"{path}: {message}", "interactions.on_bad_rows to drop"
    )


def test_the_error_names_a_damaged_file_of_a_table(tmp_path: Path, session: "SparkSession") -> None:
    path = write_orc(session, tmp_path / "log", events())
    damaged = sorted(Path(path).glob("day=1/*.orc"))[0]
    content = bytearray(damaged.read_bytes())
    content[3 : len(content) // 2] = b"\xff" * (len(content) // 2 - 3)
    damaged.write_bytes(content)
    for checksum in Path(path).glob("day=1/.*.crc"):  # of Hadoop's local file system
        checksum.unlink()
    assert_rejects(lambda folder: ingest(folder, path, **TIME_SPLIT, **ORC), tmp_path, damaged.name, "Spark cannot read it")


def test_a_table_that_changes_between_the_checks_and_the_scan_is_rejected(
    tmp_path: Path, session: "SparkSession", monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_orc(session, tmp_path / "log", events())
    read_part = incremental.read_part

    def read_later(*arguments: Any, **options: Any) -> Any:
        write_orc(session, tmp_path / "log", events(1), mode="append")
        return read_part(*arguments, **options)

    monkeypatch.setattr(incremental, "read_part", read_later)
    assert_rejects(
        lambda folder: ingest(folder, path, **TIME_SPLIT, **ORC), tmp_path, f"{path}: changed while it was being read"
    )


def test_the_unit_of_times_is_checked_in_the_first_rows(tmp_path: Path, session: "SparkSession") -> None:
    table = events()
    times = pa.array(np.full(len(table), START_US // 1_000_000))
    path = write_orc(session, tmp_path / "log", table.set_column(2, "t", times))
    config = InteractionsConfig.model_validate({"paths": path, "timestamp_column": "t", "timestamp_unit": "ms"} | ORC)
    with input_error(f"{path}: column 't': 1700000000 is 1970-01-20 in ms", "set interactions.timestamp_unit to s"):
        check_time_unit(config, open_interactions(config).sources)


@pytest.mark.parametrize(
    ("settings", "paths", "messages"),
    [
        ({"format": "delta"}, ["./log"], ["format is delta, but Spark has no connector that reads ./log", "delta-spark_2.13"]),
        ({"format": "iceberg"}, ["lake.shop.log"], ["format is iceberg, but Spark has no connector", "iceberg-spark-runtime"]),
        ({}, ["./none"], ["interactions.paths: ./none: Spark cannot open this orc table: [PATH_NOT_FOUND]"]),
        ({}, ["shop_log"], ["interactions.paths: shop_log: Spark cannot open this orc table: [TABLE_OR_VIEW_NOT_FOUND]"]),
        ({}, ["./log", "./log"], ["./log is also in interactions.paths, and its rows would count twice"]),
    ],
)
def test_a_table_that_cannot_be_opened_is_named_before_anything_is_written(
    tmp_path: Path, settings: dict[str, Any], paths: list[str], messages: list[str]
) -> None:
    assert_rejects(lambda folder: ingest(folder, *paths, **TIME_SPLIT, **(ORC | settings)), tmp_path, *messages)


def test_an_empty_table_and_a_table_outside_of_the_data_root_are_rejected(tmp_path: Path, session: "SparkSession") -> None:
    session.sql("SELECT 'u' AS user_id, 3 AS item_id, now() AS t").limit(0).write.orc(path := f"{tmp_path}/log")
    config = InteractionsConfig.model_validate({"paths": path, "timestamp_column": "t"} | ORC)
    with input_error(f"{path}: no rows"):
        open_interactions(config)
    with input_error(f"{path}: is not a folder below allowed_data_root ({tmp_path}/other)"):
        open_interactions(config, allowed_data_root=tmp_path / "other")


class Statements:
    """A session that answers the statements of a connector."""

    def __init__(self, answers: dict[str, "Callable[[], DataFrame]"]) -> None:
        self._answers = answers

    def sql(self, statement: str) -> "DataFrame":
        return self._answers[statement]()


@pytest.mark.parametrize(
    ("table_format", "path", "identifier", "newest"),
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
def test_a_versioned_table_is_read_at_its_newest_version_or_at_the_one_in_its_path(
    session: "SparkSession", monkeypatch: pytest.MonkeyPatch, table_format: Any, path: str, identifier: str, newest: str
) -> None:
    from recsys_core.ingest.log.spark_engine import tables

    answers = {newest: lambda: session.sql("SELECT 8L AS version")}
    answers |= {f"SELECT * FROM {identifier} VERSION AS OF {n}": lambda n=n: session.range(n).toDF("user_id") for n in (3, 8)}
    monkeypatch.setattr(tables, "new_session", lambda _: Statements(answers))

    def open_one(name: str) -> Any:
        settings = SparkSettings.model_validate(SPARK)
        ((source,),) = tables.open_tables(
            settings, table_format, {"interactions.paths": [name]}, columns=["user_id"], allowed_data_root=None
        )
        return source

    source, old_source = open_one(path), open_one(f"{path}@v3")
    assert [source.name, old_source.name] == [f"{path}@v8", f"{path}@v3"]
    assert [source.record.num_rows, old_source.record.num_rows] == [8, 3] and source.record != old_source.record
    assert open_one(path).record == source.record and open_one(f"{path}@v8").record == source.record
    assert tables.table_frame(Statements(answers), old_source).count() == 3  # type: ignore[arg-type]
