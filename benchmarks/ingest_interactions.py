"""The interaction log from parquet to a vocabulary and a sorted CSR store: nightjar's stage beside pandas.

    python -m benchmarks.ingest_interactions          # prints the table; `make bench-ingest` writes it down

Two pandas ways, both with string ids, a time split, rows by falling frequency, the sort by user, split, time and item, and the
arrays written with numpy: `pandas` as it is usually written (value_counts, get_indexer), `pandas_factorize` tuned (factorize,
counts of the codes). Neither checks a row, hashes or syncs a file, or leaves anything that a second night could go on from; the
stage does. Each measurement is a process of its own, the ways alternate; seconds are without imports.
"""

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.measuring import cells, in_fresh_process, measured, summary
from recsys_core.units import DAY_S

MODULE = "benchmarks.ingest_interactions"
WAYS = ("pandas", "pandas_factorize", "nightjar")
EVENTS_A_DAY = 2_000_000
FIRST_S = 1_760_000_000
SPLIT = {"kind": "time", "test_days": 1, "validation_days": 1}


def write_log(folder: Path, *, days: int, users: int, items: int, first_day: int = 0) -> None:
    """A file per day with EVENTS_A_DAY events: string ids, some far more frequent than others, times in order."""
    user_id = pa.array([f"user-{number:07d}" for number in range(users)])
    item_id = pa.array([f"item-{number:06d}" for number in range(items)])
    folder.mkdir(exist_ok=True)
    for day in range(first_day, first_day + days):
        random = np.random.default_rng(day)
        user = (users * random.random(EVENTS_A_DAY) ** 1.5).astype(np.int32)
        item = (items * random.random(EVENTS_A_DAY) ** 3).astype(np.int32)
        second = FIRST_S + DAY_S * day + np.sort(random.integers(0, DAY_S, EVENTS_A_DAY))
        columns = {"user_id": user_id.take(pa.array(user)), "item_id": item_id.take(pa.array(item))}
        table = pa.table(columns | {"timestamp": pa.array(second * 1_000_000).cast(pa.timestamp("us", "UTC"))})
        pq.write_table(table, folder / f"day-{day:03d}.parquet", row_group_size=1_000_000)


def measure(*, repeats: int = 3) -> dict[str, Any]:
    """20 million events in all ways, a second night with one more day, and 100 million events in nightjar alone."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_log(folder / "small", days=10, users=1_000_000, items=200_000)
        runs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
        for _ in range(repeats):
            for way in WAYS:
                runs[way].append(in_fresh_process(MODULE, way, str(folder / "small"), str(folder / "out"), "1GB"))
        write_log(folder / "small", days=1, users=1_000_000, items=200_000, first_day=10)
        second = in_fresh_process(MODULE, "second_night", str(folder / "small"), str(folder / "out"), "1GB")
        write_log(folder / "large", days=50, users=5_000_000, items=1_000_000)
        # The same limit for both, in one run: what a larger log costs, not what more memory does.
        logs = {name: folder / name for name in ("small", "large")}
        same_limit = {
            name: in_fresh_process(MODULE, "nightjar", str(log), str(folder / "out"), "4GB") for name, log in logs.items()
        }
    return {
        "ways": {way: summary(made) for way, made in runs.items()},
        "second_night": second,
        "same_limit": {name: made | {"seconds": round(made["seconds"], 2)} for name, made in same_limit.items()},
    }


def to_markdown(found: dict[str, Any]) -> str:
    """Three tables: beside pandas, the second night, the large log."""
    ways = found["ways"]
    lines = [
        f"{10 * EVENTS_A_DAY:,} events, 1,000,000 users and 200,000 items with string ids, 10 files; memory_limit 1GB; "
        "median, and all runs in brackets.",
        "",
        "| way | seconds | times faster than pandas | than pandas_factorize | peak anonymous MB |",
        "|:---|---:|---:|---:|---:|",
        *(f"| {' | '.join([way, *cells(ways[way], against=[ways[other] for other in WAYS[:2]])])} |" for way in WAYS),
        "",
        "The next night, one more file of 2,000,000 events; an id whose row changed would be counted.",
        "",
        "| | seconds | files read | rows read | events in the store | rows that changed |",
        "|:---|---:|---:|---:|---:|---:|",
    ]
    for name in ("first", "second"):
        row = found["second_night"][name]
        lines.append(
            f"| {name} night | {row['seconds']:.2f} | {row['files_read']} | {row['rows_read']:,} | {row['events']:,} "
            f"| {row['rows_changed']:,} |"
        )
    lines += [
        "",
        "A larger log, memory_limit 4GB for both: 22,000,000 events as above, and 100,000,000 with 5,000,000 users and "
        "1,000,000 items in 50 files.",
        "",
        "| events | seconds | microseconds per event | peak anonymous MB |",
        "|---:|---:|---:|---:|",
    ]
    for made in found["same_limit"].values():
        per_event = 1e6 * made["seconds"] / made["events"]
        lines.append(f"| {made['events']:,} | {made['seconds']:.1f} | {per_event:.3f} | {made['peak_anon_bytes'] / 1e6:,.0f} |")
    return "\n".join(lines) + "\n"


def _pandas_way(paths: list[Path], out: Path, *, tuned: bool) -> Callable[[], object]:
    import pandas as pd

    def rows(ids: Any, train: Any) -> Any:
        if tuned:
            code, unique = pd.factorize(ids)
            order = np.argsort(-np.bincount(code[train], minlength=len(unique)), kind="stable")
            row = np.empty_like(order)
            row[order] = np.arange(len(order))
            return row[code].astype(np.int32)
        frequent = ids[train].value_counts().index
        vocabulary = frequent.append(pd.Index(ids.unique()).difference(frequent))
        return vocabulary.get_indexer(ids).astype(np.int32)

    def work() -> object:
        log = pd.concat([pd.read_parquet(path) for path in paths], ignore_index=True)
        test = log["timestamp"].max() - pd.Timedelta(days=1)
        split = np.where(log["timestamp"] > test, 2, np.where(log["timestamp"] > test - pd.Timedelta(days=1), 1, 0))
        train = split == 0
        codes = {"user": rows(log["user_id"], train), "item": rows(log["item_id"], train)}
        stored = pd.DataFrame(codes | {"split": split.astype(np.int8), "time": log["timestamp"]})
        stored = stored.sort_values(["user", "split", "time", "item"])
        np.save(out / "user_offset.npy", np.concatenate([[0], np.cumsum(np.bincount(stored["user"]))]))
        np.save(out / "event_item.npy", stored["item"].to_numpy())
        np.save(out / "event_time.npy", stored["time"].astype(np.int64).to_numpy())
        np.save(out / "item_count.npy", np.bincount(stored["item"][stored["split"] == 0]))
        return stored

    return work


def _nightjar(paths: list[Path], folder: Path, *, memory_limit: str, previous: Any = None) -> Any:
    from recsys_core.data.interactions.config import InteractionsConfig
    from recsys_core.data.interactions.ingest import ingest_interactions

    config = InteractionsConfig(
        paths=tuple(map(str, paths)), timestamp_column="timestamp", split=SPLIT, memory_limit=memory_limit
    )
    return ingest_interactions(config, embeddings=None, folder=folder, previous=previous)


def _two_nights(paths: list[Path], out: Path, *, memory_limit: str) -> dict[str, Any]:
    first = _nightjar(paths[:-1], out / "first", memory_limit=memory_limit)
    second = _nightjar(paths, out / "second", memory_limit=memory_limit, previous=first)
    changed = 0
    for side in ("users", "items"):
        before, after = (pq.read_table(night.path(f"{side}.parquet"), columns=["id"]).column("id") for night in (first, second))
        changed += int((before.to_numpy() != after.slice(0, len(before)).to_numpy()).sum())
    return {
        name: {
            "seconds": night.seconds,
            "files_read": night.files_read,
            "rows_read": night.rows_read,
            "events": night.train_events + night.validation_events + night.test_events,
            "rows_changed": changed,
        }
        for name, night in {"first": first, "second": second}.items()
    }


def _answer(way: str, paths: list[Path], out: Path, memory_limit: str) -> dict[str, Any]:
    if way == "second_night":
        return _two_nights(paths, out, memory_limit=memory_limit)
    events = sum(pq.read_metadata(path).num_rows for path in paths)
    if way == "nightjar":
        from recsys_core.data.interactions import ingest  # noqa: F401  so that the import is not measured

        return measured(lambda: _nightjar(paths, out / "stage", memory_limit=memory_limit)) | {"events": events}
    return measured(_pandas_way(paths, out, tuned=way == "pandas_factorize")) | {"events": events}


def main() -> None:
    """One measurement where arguments say which, else all."""
    if len(sys.argv) == 5:
        way, folder, out, memory_limit = sys.argv[1:]
        Path(out).mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out) as scratch:
            answer = _answer(way, sorted(Path(folder).glob("*.parquet")), Path(scratch), memory_limit)
        sys.stdout.write(json.dumps(answer) + "\n")
        return
    sys.stdout.write(to_markdown(measure()))


if __name__ == "__main__":
    main()
