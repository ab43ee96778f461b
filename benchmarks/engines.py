"""Comparison of DuckDB and Spark, the engines of the log ingest: their event stores and times for a log with every filter.

    python -m benchmarks.engines          # writes benchmarks/engines.json
    python -m benchmarks.engines 1000000  # another number of events; prints the result

The log has bots, repeated events, rare ids, labels below the threshold, bad rows, weights, context columns, and events after
`until`. Each engine runs in its own process. The time of Spark includes the start of the Java process.
"""

import json
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.measuring import ROOT, measure_work, run_in_new_process
from recsys_core.ingest.log.config import InteractionsConfig
from recsys_core.ingest.log.ingest import ingest_interactions
from recsys_core.manifests import InteractionsManifest, load_manifest
from recsys_core.units import DAY_S

MODULE = "benchmarks.engines"
NUM_EVENTS = 20_000_000
NUM_DAYS = 60
FIRST_TIME_S = 1_700_000_000
SETTINGS: dict[str, Any] = {
    "timestamp_column": "time",
    "label_column": "rating",
    "label_threshold": 2.0,
    "label_range": (0.0, 5.0),
    "explicit_negatives": True,
    "weight_column": "weight",
    "context_columns": ("device", "slot", "time"),
    "on_bad_rows": "drop",
    "max_bad_share": 0.05,
    "filter": {
        "until": datetime.fromtimestamp(FIRST_TIME_S + (NUM_DAYS - 2) * DAY_S, UTC).isoformat(),
        "window_days": NUM_DAYS - 6,
        "duplicates": "last",
        "bot_threshold": 400,
        "min_user_events": 3,
        "min_item_events": 4,
        "max_user_events": 20,
    },
}
ENGINES: dict[str, dict[str, Any]] = {
    "duckdb": {"kind": "duckdb"},
    "spark": {"kind": "spark", "master": "local[2]", "conf": {"spark.driver.memory": "3g", "spark.sql.shuffle.partitions": 16}},
}
UNEQUAL_FIELDS = {"files", "folder", "parts", "seconds"}
"""Fields of a manifest that may differ between engines. `files` and `parts` are compared in `differences`."""


def write_log(folder: Path, *, num_events: int, num_files: int = 4) -> None:
    """Write a log with string ids of skewed frequencies in random order. The last file has times in nanoseconds."""
    folder.mkdir(parents=True)
    num_users, num_items, num_rows = num_events // 12, num_events // 60, num_events // num_files
    for file_index in range(num_files):
        rng = np.random.default_rng(file_index)
        user_index = (num_users * rng.random(num_rows) ** 1.5).astype(np.int64)
        user_index[rng.random(num_rows) < 0.03] %= 5  # bots
        item_index = (num_items * rng.random(num_rows) ** 3).astype(np.int64)
        time_us = FIRST_TIME_S * 1_000_000 + rng.integers(0, NUM_DAYS * DAY_S // 60, num_rows) * 60_000_000
        rating = rng.integers(0, 11, num_rows) / 2
        rating[rng.random(num_rows) < 0.002] = np.nan
        rating[rng.random(num_rows) < 0.001] = 7.0
        time_unit, units_per_us = ("ns", 1_000) if file_index == num_files - 1 else ("us", 1)
        users = pa.array(np.char.add("u", user_index.astype(str)), mask=rng.random(num_rows) < 0.001)
        table = pa.table(
            {
                "user_id": users,
                "item_id": pa.array(np.char.add("Ä", item_index.astype(str))),
                "time": pa.array(time_us * units_per_us, pa.timestamp(time_unit, "UTC")),
                "rating": rating.astype(np.float32),
                "weight": rng.integers(0, 1_000, num_rows) / 7,
                "device": pa.array(rng.choice(["phone", "tv", "web"], num_rows), mask=rng.random(num_rows) < 0.1),
                "slot": pa.array(rng.integers(0, 200, num_rows), pa.uint8()),
            }
        )
        repeated_rows = rng.integers(0, num_rows, num_rows // 20)
        table = pa.concat_tables([table.slice(0, num_rows - len(repeated_rows)), table.take(repeated_rows)])
        pq.write_table(table, folder / f"{file_index}.parquet", row_group_size=1_000_000)


def ingest(paths: Path, folder: Path, *, engine: dict[str, Any], **settings: Any) -> InteractionsManifest:
    """Ingest the log of `write_log` with one engine."""
    config = InteractionsConfig.model_validate({"paths": str(paths), "engine": engine} | SETTINGS | settings)
    return ingest_interactions(config, embeddings=None, folder=folder)


def differences(first: InteractionsManifest, second: InteractionsManifest) -> list[str]:
    """Return the names of fields and files in which two stores differ. Of the parts, only the read log files are compared."""
    first_fields, second_fields = (manifest.model_dump(exclude=UNEQUAL_FIELDS) for manifest in (first, second))
    differing_names = [name for name, value in first_fields.items() if second_fields[name] != value]
    if [part.files for part in first.parts] != [part.files for part in second.parts]:
        differing_names.append("parts")
    file_names = [{name for name in manifest.files if not name.startswith("parts/")} for manifest in (first, second)]
    differing_names += sorted(file_names[0] ^ file_names[1])
    for name in sorted(file_names[0] & file_names[1]):
        is_table = name.endswith(".parquet")  # engines may encode the same table in different bytes
        if first.files[name] != second.files[name] and not (is_table and _same_table(first.path(name), second.path(name))):
            differing_names.append(name)
    return differing_names


def _same_table(first: Path, second: Path) -> bool:
    first_table, second_table = pq.read_table(first), pq.read_table(second)
    # Schemas are not compared, because DuckDB also declares that an id is never null.
    return (first_table.column_names, first_table.columns) == (second_table.column_names, second_table.columns)


def measure(num_events: int) -> dict[str, Any]:
    """Ingest a log with both engines, and compare the stores."""
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        write_log(folder / "log", num_events=num_events)
        runs = {name: run_in_new_process(MODULE, "ingest", name, str(folder)) for name in ENGINES}
        manifests = [load_manifest(folder / name, InteractionsManifest) for name in ENGINES]
        first, second = manifests
        assert first is not None and second is not None
        return {
            "num_events": num_events,
            "num_stored_events": first.num_events,
            "num_removed_events_by_filter": first.num_removed_events_by_filter,
            "num_known_negatives": first.num_known_negatives,
            "differences": differences(first, second),
            "seconds": {name: round(run["seconds"], 1) for name, run in runs.items()},
            "seconds_of_spark_per_second_of_duckdb": round(runs["spark"]["seconds"] / runs["duckdb"]["seconds"], 1),
            "duckdb": duckdb.__version__,
            "spark": ENGINES["spark"],
        }


def _ingest_here(name: str, folder: Path) -> dict[str, Any]:
    return measure_work(lambda: ingest(folder / "log", folder / name, engine=ENGINES[name]))


if __name__ == "__main__":
    if sys.argv[1:2] == ["ingest"]:
        print(json.dumps(_ingest_here(sys.argv[2], Path(sys.argv[3]))))  # noqa: T201
    else:
        result = measure(int(sys.argv[1]) if sys.argv[1:] else NUM_EVENTS)
        text = json.dumps(result | {"date": datetime.now(UTC).date().isoformat()}, indent=2) + "\n"
        if sys.argv[1:]:
            sys.stdout.write(text)
        else:
            (ROOT / "benchmarks" / "engines.json").write_text(text)
