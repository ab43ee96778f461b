"""Benchmark of the ingest of the interaction log, from parquet to a sorted CSR store, compared with pandas and polars.

    python -m benchmarks.ingest_interactions          # prints the tables; `make bench-ingest` writes them

Three programs serve as references: `pandas` uses value_counts and get_indexer, and the faster programs `pandas_factorize` and
`polars` use counts of codes. All of them split by time, number string ids by decreasing frequency, sort by user, split, time
and item, and write the arrays with numpy. Unlike nightjar's stage, they do not check rows, do not hash files or sync them to
disk, and cannot continue from a previous run. polars is measured only if it is installed (`pip install polars`). Each
measurement runs in a separate process, the methods alternate, and the time of imports is excluded.
"""

import json
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.measuring import measure_work, run_in_new_process, summarise_runs, table_cells
from recsys_core.units import DAY_S

MODULE = "benchmarks.ingest_interactions"
METHODS = ("pandas", "pandas_factorize", *(["polars"] if find_spec("polars") else []), "nightjar")
NUM_DAYS_BY_TABLE = {"methods": 10, "few_events": 3}
"""Number of days in the log of each table that compares the methods."""
EVENTS_PER_DAY = 2_000_000
FIRST_TIMESTAMP_S = 1_760_000_000
SPLIT = {"kind": "time", "test_days": 1, "validation_days": 1}


def write_log(folder: Path, *, num_days: int, num_users: int, num_items: int, first_day: int = 0) -> None:
    """Write one file per day with EVENTS_PER_DAY events: string ids with skewed frequencies, in time order."""
    user_ids = pa.array([f"user-{number:07d}" for number in range(num_users)])
    item_ids = pa.array([f"item-{number:06d}" for number in range(num_items)])
    folder.mkdir(exist_ok=True)
    for day in range(first_day, first_day + num_days):
        rng = np.random.default_rng(day)
        user_index = (num_users * rng.random(EVENTS_PER_DAY) ** 1.5).astype(np.int32)
        item_index = (num_items * rng.random(EVENTS_PER_DAY) ** 3).astype(np.int32)
        timestamp_s = FIRST_TIMESTAMP_S + DAY_S * day + np.sort(rng.integers(0, DAY_S, EVENTS_PER_DAY))
        columns = {"user_id": user_ids.take(pa.array(user_index)), "item_id": item_ids.take(pa.array(item_index))}
        table = pa.table(columns | {"timestamp": pa.array(timestamp_s * 1_000_000).cast(pa.timestamp("us", "UTC"))})
        pq.write_table(table, folder / f"day-{day:03d}.parquet", row_group_size=1_000_000)


def measure(*, repeats: int = 3) -> dict[str, Any]:
    """Measure 20 and 6 million events with all methods, a run with one more day, and 100 million events with nightjar."""
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        for table, num_days in NUM_DAYS_BY_TABLE.items():
            write_log(folder / table, num_days=num_days, num_users=1_000_000, num_items=200_000)
            runs_by_method: dict[str, list[dict[str, Any]]] = {method: [] for method in METHODS}
            for _ in range(repeats):
                for method in METHODS:
                    runs_by_method[method].append(
                        run_in_new_process(MODULE, method, str(folder / table), str(folder / "out"), "1GB")
                    )
            results[table] = {method: summarise_runs(measurements) for method, measurements in runs_by_method.items()}
        small_folder = folder / "methods"
        write_log(small_folder, num_days=1, num_users=1_000_000, num_items=200_000, first_day=10)
        results["second_run"] = run_in_new_process(MODULE, "second_run", str(small_folder), str(folder / "out"), "1GB")
        write_log(folder / "large", num_days=50, num_users=5_000_000, num_items=1_000_000)
        # Both logs have the same memory limit, so that only their sizes differ.
        result_by_log = {
            name: run_in_new_process(MODULE, "nightjar", str(log_folder), str(folder / "out"), "4GB")
            for name, log_folder in {"small": small_folder, "large": folder / "large"}.items()
        }
    return results | {
        "same_limit": {name: result | {"seconds": round(result["seconds"], 2)} for name, result in result_by_log.items()},
    }


def to_markdown(results: dict[str, Any]) -> str:
    """Return the comparisons of the methods, the second run, and the large log as tables."""
    lines = [
        "The ids of 1,000,000 users and 200,000 items are strings. The memory limit of DuckDB is 1GB. `pandas_factorize` is a",
        "faster program with pandas. The tables have the median of the seconds, with all runs in brackets. Anonymous memory is",
        "memory that is not backed by a file.",
        "",
    ]
    for table, num_days in NUM_DAYS_BY_TABLE.items():
        lines += _comparison(results[table], num_events=num_days * EVENTS_PER_DAY)
    lines += [
        "Before the second run, a file with 2,000,000 new events is added to the log. The second run reads only this file, and",
        "every id keeps its row.",
        "",
        "| | seconds | files read | rows read | events after the run | ids whose row changed |",
        "|:---|---:|---:|---:|---:|---:|",
    ]
    for run_name in ("first", "second"):
        run = results["second_run"][run_name]
        lines.append(
            f"| {run_name} run | {run['seconds']:.2f} | {run['files_read']} | {run['rows_read']:,} | {run['events']:,} "
            f"| {run['rows_changed']:,} |"
        )
    lines += [
        "",
        "The next table compares the log above with a log of 100,000,000 events, 5,000,000 users and 1,000,000 items in",
        "50 files. The memory limit of DuckDB is 4GB.",
        "",
        "| events | seconds | microseconds per event | largest anonymous memory, MB |",
        "|---:|---:|---:|---:|",
    ]
    for run in results["same_limit"].values():
        event_us = 1e6 * run["seconds"] / run["events"]
        lines.append(f"| {run['events']:,} | {run['seconds']:.1f} | {event_us:.3f} | {run['peak_anon_bytes'] / 1e6:,.0f} |")
    return "\n".join(lines) + "\n"


def _comparison(result_by_method: dict[str, Any], *, num_events: int) -> list[str]:
    """Return the lines of a table with the speed-up of each method over the references."""
    names = [method for method in result_by_method if method != "nightjar"]
    references = [result_by_method[name] for name in names]
    headings = [f"{num_events:,} events", "seconds", *(f"speed-up over {name}" for name in names), "peak anonymous MB"]
    rows = ([method, *table_cells(result, references=references)] for method, result in result_by_method.items())
    lines = [headings, [":---", *["---:"] * (len(headings) - 1)], *rows]
    return [*(f"| {' | '.join(cells)} |" for cells in lines), ""]


def _pandas_work(paths: list[Path], output_folder: Path, *, use_factorize: bool) -> Callable[[], object]:
    import pandas as pd

    def vocabulary_rows(ids: Any, is_train: Any) -> Any:
        if use_factorize:
            id_codes, _ = pd.factorize(ids)
            return _rows_by_frequency(id_codes, is_train)
        train_ids_by_frequency = ids[is_train].value_counts().index
        vocabulary = train_ids_by_frequency.append(pd.Index(ids.unique()).difference(train_ids_by_frequency))
        return vocabulary.get_indexer(ids).astype(np.int32)

    def work() -> object:
        log = pd.concat([pd.read_parquet(path) for path in paths], ignore_index=True)
        timestamps, one_day = log["timestamp"], pd.Timedelta(days=1)
        test_start = timestamps.max() - one_day
        split_codes = np.where(timestamps > test_start, 2, np.where(timestamps > test_start - one_day, 1, 0))
        is_train = split_codes == 0
        rows_by_side = {"user": vocabulary_rows(log["user_id"], is_train), "item": vocabulary_rows(log["item_id"], is_train)}
        events = pd.DataFrame(rows_by_side | {"split": split_codes.astype(np.int8), "time": timestamps})
        events = events.sort_values(["user", "split", "time", "item"])
        np.save(output_folder / "user_offset.npy", np.concatenate([[0], np.cumsum(np.bincount(events["user"]))]))
        np.save(output_folder / "event_item.npy", events["item"].to_numpy())
        np.save(output_folder / "event_time.npy", events["time"].astype(np.int64).to_numpy())
        np.save(output_folder / "item_count.npy", np.bincount(events["item"][events["split"] == 0]))
        return events

    return work


def _polars_work(paths: list[Path], output_folder: Path) -> Callable[[], object]:
    import polars as pl

    def work() -> object:
        log = pl.read_parquet(paths)
        test_start, one_day = log["timestamp"].max() - timedelta(days=1), timedelta(days=1)
        is_test, is_held_out = pl.col("timestamp") > test_start, pl.col("timestamp") > test_start - one_day
        split = log.select(pl.when(is_test).then(2).when(is_held_out).then(1).otherwise(0).cast(pl.Int8)).to_series()
        is_train = (split == 0).to_numpy()
        rows_by_side = {
            side: _rows_by_frequency(log[f"{side}_id"].cast(pl.Categorical).to_physical().to_numpy(), is_train)
            for side in ("user", "item")
        }
        events = pl.DataFrame(rows_by_side | {"split": split, "time": log["timestamp"]})
        events = events.sort(["user", "split", "time", "item"])
        np.save(output_folder / "user_offset.npy", np.concatenate([[0], np.cumsum(np.bincount(events["user"]))]))
        np.save(output_folder / "event_item.npy", events["item"].to_numpy())
        np.save(output_folder / "event_time.npy", events["time"].to_physical().to_numpy())
        np.save(output_folder / "item_count.npy", np.bincount(events["item"].filter(events["split"] == 0)))
        return events

    return work


def _rows_by_frequency(code_L: Any, is_train_L: Any) -> Any:
    """Return the row of each id, where the code with the most training events has row 0."""
    codes_by_frequency = np.argsort(-np.bincount(code_L[is_train_L], minlength=code_L.max() + 1), kind="stable")
    row_by_code = np.empty(len(codes_by_frequency), np.int32)
    row_by_code[codes_by_frequency] = np.arange(len(codes_by_frequency))
    return row_by_code[code_L]


def _nightjar(paths: list[Path], folder: Path, *, memory_limit: str, previous: Any = None) -> Any:
    from recsys_core.ingest.log.config import InteractionsConfig
    from recsys_core.ingest.log.ingest import ingest_interactions

    config = InteractionsConfig(
        paths=tuple(map(str, paths)), timestamp_column="timestamp", split=SPLIT, memory_limit=memory_limit
    )
    return ingest_interactions(config, embeddings=None, folder=folder, previous=previous)


def _two_runs(paths: list[Path], output_folder: Path, *, memory_limit: str) -> dict[str, Any]:
    first_run = _nightjar(paths[:-1], output_folder / "first", memory_limit=memory_limit)
    second_run = _nightjar(paths, output_folder / "second", memory_limit=memory_limit, previous=first_run)
    num_changed_rows = 0
    for side in ("users", "items"):
        ids_before, ids_after = (
            pq.read_table(run.path(f"{side}.parquet"), columns=["id"]).column("id") for run in (first_run, second_run)
        )
        num_changed_rows += int((ids_before.to_numpy() != ids_after.slice(0, len(ids_before)).to_numpy()).sum())
    return {
        run_name: {
            "seconds": run.seconds,
            "files_read": run.num_files_read,
            "rows_read": run.num_rows_read,
            "events": run.num_events,
            "rows_changed": num_changed_rows,
        }
        for run_name, run in {"first": first_run, "second": second_run}.items()
    }


def _measure_one(method: str, paths: list[Path], output_folder: Path, memory_limit: str) -> dict[str, Any]:
    if method == "second_run":
        return _two_runs(paths, output_folder, memory_limit=memory_limit)
    num_events = sum(pq.read_metadata(path).num_rows for path in paths)
    if method == "nightjar":
        import pandas  # noqa: F401  pyarrow imports it later, and no method's import time is measured

        from recsys_core.ingest.log import ingest  # noqa: F401

        return measure_work(lambda: _nightjar(paths, output_folder / "stage", memory_limit=memory_limit)) | {
            "events": num_events
        }
    if method == "polars":
        return measure_work(_polars_work(paths, output_folder)) | {"events": num_events}
    return measure_work(_pandas_work(paths, output_folder, use_factorize=method == "pandas_factorize")) | {"events": num_events}


def main() -> None:
    """Measure the method given as an argument. Without arguments, measure all methods and print the tables."""
    if len(sys.argv) == 5:
        method, log_folder, output_folder, memory_limit = sys.argv[1:]
        Path(output_folder).mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=output_folder) as scratch_folder:
            result = _measure_one(method, sorted(Path(log_folder).glob("*.parquet")), Path(scratch_folder), memory_limit)
        sys.stdout.write(json.dumps(result) + "\n")
        return
    sys.stdout.write(to_markdown(measure()))


if __name__ == "__main__":
    main()
