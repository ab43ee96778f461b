"""Benchmark of the processor time of `ingest_features`, compared with the ingest of the log.

    python -m benchmarks.features          # writes benchmarks/features.json
    python -m benchmarks.features 1000000  # another number of events; prints the result

The catalogue has half as many items as the log has events. Every item and event has three features: a text with many values,
an integer with few values, and a number that is divided into buckets. The processor time is measured because it depends less
on other processes than the duration. The result shows whether a cluster would help.
"""

import json
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.measuring import ROOT, measure_work, run_in_new_process
from recsys_core.ingest.features.config import FeaturesConfig
from recsys_core.ingest.features.ingest import ingest_features
from recsys_core.ingest.log.config import InteractionsConfig
from recsys_core.ingest.log.ingest import ingest_interactions
from recsys_core.manifests import Dataset, InteractionsManifest, load_manifest
from recsys_core.units import DAY_S

MODULE = "benchmarks.features"
NUM_EVENTS = 10_000_000
MEMORY_LIMIT = "1GB"
NUM_THREADS = 2
_FEATURES: list[dict[str, Any]] = [{"name": "a"}, {"name": "b"}, {"name": "c", "kind": "numeric", "buckets": 50}]
_FILE_ROWS = 5_000_000


def write_data(folder: Path, *, num_events: int) -> None:
    """Write the log, with the features of its events, and the table of items."""
    for name in ("log", "item_table"):
        (folder / name).mkdir(parents=True)
    num_items, num_users, rng = num_events // 2, num_events // 12, np.random.default_rng(0)
    for start in range(0, num_events, _FILE_ROWS):
        num_rows = min(_FILE_ROWS, num_events - start)
        columns = {
            "user_id": rng.integers(0, num_users, num_rows),
            "item_id": (num_items * rng.random(num_rows) ** 2).astype(np.int64),
            "time": 1_700_000_000 + rng.integers(0, 60 * DAY_S, num_rows),
        }
        pq.write_table(pa.table(columns | _feature_values(rng, num_rows)), folder / "log" / f"{start}.parquet")
    for start in range(0, num_items, _FILE_ROWS):
        num_rows = min(_FILE_ROWS, num_items - start)
        table = pa.table({"item_id": np.arange(start, start + num_rows)} | _feature_values(rng, num_rows))
        pq.write_table(table, folder / "item_table" / f"{start}.parquet")


def _feature_values(rng: np.random.Generator, num_rows: int) -> dict[str, pa.Array]:
    many_values = pa.array((rng.random(num_rows) ** 3 * 200_000).astype(np.int64)).cast(pa.string())
    return {"a": many_values, "b": pa.array(rng.integers(0, 5_000, num_rows)), "c": pa.array(rng.random(num_rows))}


def measure(num_events: int) -> dict[str, Any]:
    """Ingest the log, the item features and the event features, each in its own process, and return the measurements."""
    with tempfile.TemporaryDirectory() as folder:
        write_data(Path(folder), num_events=num_events)
        runs = {stage: run_in_new_process(MODULE, stage, folder) for stage in ("interactions", "items", "context")}
        interactions = load_manifest(Path(folder) / "interactions", InteractionsManifest)
        assert interactions is not None
    num_rows_by_stage = {"interactions": num_events, "items": interactions.num_items, "context": num_events}
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "num_features": len(_FEATURES),
        "memory_limit": MEMORY_LIMIT,
        "num_threads": NUM_THREADS,
        "duckdb": duckdb.__version__,
        "stages": {
            stage: {
                "num_rows": num_rows_by_stage[stage],
                "processor_seconds": round(run["processor_seconds"], 1),
                "processor_seconds_per_100_million_rows": round(run["processor_seconds"] * 1e8 / num_rows_by_stage[stage]),
                "peak_memory_mb": round(run["peak_anon_bytes"] / 1e6),
            }
            for stage, run in runs.items()
        },
    }


def _ingest_here(stage: str, folder: Path) -> dict[str, Any]:
    def work() -> object:
        if stage == "interactions":
            columns = {"timestamp_column": "time", "context_columns": [feature["name"] for feature in _FEATURES]}
            config = {"paths": str(folder / "log"), "memory_limit": MEMORY_LIMIT, "threads": NUM_THREADS} | columns
            return ingest_interactions(InteractionsConfig.model_validate(config), embeddings=None, folder=folder / stage)
        interactions = load_manifest(folder / "interactions", InteractionsManifest)
        assert interactions is not None
        items = {"paths": str(folder / "item_table"), "id_column": "item_id", "features": _FEATURES}
        return ingest_features(
            FeaturesConfig.model_validate({"items": items} if stage == "items" else {"context": _FEATURES}),
            dataset=Dataset(interactions),
            previous=None,
            memory_limit=MEMORY_LIMIT,
            threads=NUM_THREADS,
            folder=folder / stage,
        )

    start_s = time.process_time()
    measurement = measure_work(work)
    return measurement | {"processor_seconds": time.process_time() - start_s}


if __name__ == "__main__":
    if sys.argv[1:2] and not sys.argv[1].isdigit():
        print(json.dumps(_ingest_here(sys.argv[1], Path(sys.argv[2]))))  # noqa: T201
    else:
        text = json.dumps(measure(int(sys.argv[1]) if sys.argv[1:] else NUM_EVENTS), indent=2) + "\n"
        if sys.argv[1:]:
            sys.stdout.write(text)
        else:
            (ROOT / "benchmarks" / "features.json").write_text(text)
