"""Event stores of Spark and of DuckDB, which must be equal in every array, vocabulary and manifest field."""

from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.engines import NUM_EVENTS, differences, measure, write_log
from benchmarks.engines import ingest as ingest_generated
from recsys_core.ingest.vectors.config import EmbeddingsConfig
from recsys_core.ingest.vectors.ingest import ingest_embeddings
from recsys_core.manifests import EmbeddingsManifest, InteractionsManifest
from recsys_core.units import DAY_US
from tests.recsys_core.ingest.interaction_logs import ingest
from tests.recsys_core.ingest.parquet_files import raises_input_error, write_parquet
from tests.recsys_core.ingest.spark_sessions import SPARK_SETTINGS

pytestmark = pytest.mark.usefixtures("spark")
DATA_FOLDER = Path(__file__).parents[6] / "shared" / "data"
ENGINES: dict[str, dict[str, Any]] = {"duckdb": {"kind": "duckdb"}, "spark": SPARK_SETTINGS}
ManifestByEngine = dict[str, InteractionsManifest]


def ingest_with_both(folder: Path, *paths: str, previous: ManifestByEngine | None = None, **settings: Any) -> ManifestByEngine:
    """Ingest with both engines, each after its own previous run, and assert that the stores are the same."""
    manifest_by_engine = {
        kind: ingest(folder / kind, *paths, engine=engine, previous=previous and previous[kind], **settings)
        for kind, engine in ENGINES.items()
    }
    assert differences(manifest_by_engine["duckdb"], manifest_by_engine["spark"]) == []
    return manifest_by_engine


def test_a_log_with_every_filter_has_the_same_store(tmp_path: Path) -> None:
    write_log(tmp_path / "log", num_events=200_000)
    duckdb_manifest, spark_manifest = (
        ingest_generated(tmp_path / "log", tmp_path / kind, engine=ENGINES[kind]) for kind in ENGINES
    )
    num_removed_by_filter = duckdb_manifest.num_removed_events_by_filter
    expected_filters = {"below_threshold", "outside_window", "duplicates", "bot_users", "bot_events", "rare", "over_cap"}
    assert {*num_removed_by_filter} == expected_filters
    assert duckdb_manifest.num_known_negatives > 0 and len(duckdb_manifest.num_bad_rows_by_reason) == 3
    assert differences(duckdb_manifest, spark_manifest) == []


@pytest.mark.drill
def test_twenty_million_events_with_every_filter_have_the_same_store() -> None:
    """Each engine runs in its own process, because the Spark session of this process has too little memory."""
    comparison = measure(NUM_EVENTS)
    assert len(comparison["num_removed_events_by_filter"]) == 7  # every filter
    assert comparison["differences"] == []


def test_a_second_run_has_the_same_rows_and_reads_only_new_files(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    settings: dict[str, Any] = {"split": {"kind": "leave_last_out", "num_folds": 2}, "weight_column": "weight"}
    settings |= {"label_column": "stars", "label_threshold": 1, "explicit_negatives": True, "filter": {"min_item_events": 2}}

    def write_day(day: int, *, first_id: int) -> str:
        users, items = (rng.integers(first_id, first_id + 30, 300) for _ in range(2))
        time_us = (day * DAY_US + rng.integers(0, 40, 300) * DAY_US // 40).astype(np.int64)
        columns = {
            "user_id": users,
            "item_id": items,
            "t": time_us,
            "stars": rng.integers(0, 4, 300),
            "weight": rng.random(300),
        }
        return write_parquet(tmp_path / "log" / f"dt=2026-01-0{day}" / "a.parquet", **columns)

    first_paths = [write_day(day, first_id=10 * day) for day in (1, 2, 3)]
    vectors_path = write_parquet(tmp_path / "vectors.parquet", item_id=np.array([999, 15, 40]), v=[[1.0], [2.0], [3.0]])
    vectors_config = EmbeddingsConfig(paths=vectors_path, vector_column="v")
    embeddings = ingest_embeddings((vectors_config,), folder=tmp_path / "embeddings")
    first_manifest_by_engine = ingest_with_both(tmp_path / "first", *first_paths, embeddings=embeddings, **settings)
    paths = [*first_paths[1:], write_day(4, first_id=45)]
    second_manifest_by_engine = ingest_with_both(
        tmp_path / "second", *paths, previous=first_manifest_by_engine, embeddings=embeddings, **settings
    )
    assert (
        second_manifest_by_engine["spark"].num_files_read,
        second_manifest_by_engine["spark"].run_number,
        len(second_manifest_by_engine["spark"].parts),
    ) == (1, 2, 2)
    # A run with Spark after a run with DuckDB reads all files again, and every id keeps its row.
    spark_manifest = ingest(
        tmp_path / "crossed",
        *paths,
        engine=SPARK_SETTINGS,
        previous=first_manifest_by_engine["duckdb"],
        embeddings=embeddings,
        **settings,
    )
    assert spark_manifest.num_files_read == 3
    for side in ("users", "items"):
        first_ids, ids = (
            pq.read_table(manifest.path(f"{side}.parquet")).column("id").to_pylist()
            for manifest in (first_manifest_by_engine["duckdb"], spark_manifest)
        )
        assert ids[: len(first_ids)] == first_ids and len(ids) > len(first_ids)


def test_ids_times_and_context_values_of_any_type_have_the_same_store(tmp_path: Path) -> None:
    times = [1_700_000_000_123_456 + step * DAY_US for step in (0, 5, 9)]
    context: dict[str, Any] = {
        "date": pa.array([1, 2, 3], pa.int32()).cast(pa.date32()),
        "boolean": [True, None, False],
        "float": [0.5, None, -1.0],
        "decimal": [Decimal("1.00"), Decimal("2.50"), None],
        "list": [["p", "q"], [], None],
        "unsigned": pa.array([0, 1, 2], pa.uint8()),
    }
    zones = {"us": "UTC", "ns": "Asia/Kolkata", "ms": "UTC"}
    for unit, zone in zones.items():
        ticks = [time * 1_000 if unit == "ns" else time // 1_000 if unit == "ms" else time for time in times]
        write_parquet(
            tmp_path / "log" / f"{unit}.parquet",
            user_id=pa.array([1, 2, 1], pa.uint64() if unit == "us" else pa.int16()),
            item_id=pa.array(["a", "ä", "\0x"]),
            t=pa.array(ticks, pa.timestamp(unit, zone)),
            **context,
        )
    manifest_by_engine = ingest_with_both(
        tmp_path / "stage", str(tmp_path / "log"), split={"kind": "time"}, context_columns=tuple(context)
    )
    assert manifest_by_engine["spark"].num_rows_read == 9


def test_an_order_column_of_large_decimals_and_integers_has_the_same_store(tmp_path: Path) -> None:
    sequences = [pa.array([Decimal(2**53 + number) for number in (3, 1, 2)], pa.decimal128(20, 0)), pa.array([4, 6, 5])]
    for file_number, sequence in enumerate(sequences):
        items = list(range(3 * file_number, 3 * file_number + 3))
        write_parquet(tmp_path / "log" / f"{file_number}.parquet", user_id=[1, 1, 1], item_id=items, sequence=sequence)
    second_user_path = write_parquet(tmp_path / "second_user.parquet", user_id=[2], item_id=[0], sequence=[1])
    ingest_with_both(
        tmp_path / "stage", str(tmp_path / "log"), second_user_path, split={"kind": "leave_last_out"}, order_column="sequence"
    )


def test_times_near_the_64_bit_limits_are_bad_rows_with_the_same_reasons(tmp_path: Path) -> None:
    ids = {"user_id": [1, 1, 1, 2, 2, 2], "item_id": [5, 6, 7, 5, 6, 7]}
    unsigned_times = pa.array([1, 2, 3, 2**64 - 1, None, 2**63 - 1], pa.uint64())
    unsigned_path = write_parquet(tmp_path / "a.parquet", **ids, t=unsigned_times)
    settings: dict[str, Any] = {"split": {"kind": "leave_last_out"}, "timestamp_unit": "ms"}
    settings |= {"on_bad_rows": "drop", "max_bad_share": 0.9, "filter": {"duplicates": "exact"}}
    signed_path = write_parquet(tmp_path / "b.parquet", **ids, t=pa.array([4, 5, 6, -1, 7, -(2**63)]))
    manifest_by_engine = ingest_with_both(tmp_path / "stage", unsigned_path, signed_path, **settings)
    assert manifest_by_engine["spark"].num_bad_rows_by_reason == {"t: null": 1, "t: in the future": 2, "t: before 1970": 2}


def test_a_context_column_with_another_time_unit_needs_a_rebuild(tmp_path: Path) -> None:
    ids = {"user_id": [1, 1, 1, 2], "item_id": [5, 6, 7, 5], "t": [1, 2, 3, 4]}
    paths = [
        write_parquet(tmp_path / f"{unit}.parquet", **ids, seen=pa.array([1, 2, 3, 4], pa.timestamp(unit)))
        for unit in ("us", "ns")
    ]
    settings: dict[str, Any] = {"split": {"kind": "leave_last_out"}, "context_columns": ("seen",), "engine": SPARK_SETTINGS}
    first_manifest = ingest(tmp_path / "first", paths[0], **settings)
    with raises_input_error(
        "column 'seen' is timestamp[ns] in new files, but timestamp[us] in files of earlier runs", "rebuild to always"
    ):
        ingest(tmp_path / "second", *paths, previous=first_manifest, **settings)


def ingest_vectors(folder: Path, dataset: str) -> EmbeddingsManifest:
    config = EmbeddingsConfig(paths=str(DATA_FOLDER / dataset / "item_embeddings.parquet"), vector_column="embedding")
    return ingest_embeddings((config,), folder=folder / "embeddings")


@pytest.mark.skipif(not DATA_FOLDER.exists(), reason="the public data are not on this machine")
@pytest.mark.parametrize(
    "dataset", ["beauty", *(pytest.param(dataset, marks=pytest.mark.drill) for dataset in ("citeulike_t", "ml1m"))]
)
def test_datasets_of_publications_have_the_same_store(tmp_path: Path, dataset: str) -> None:
    folder = DATA_FOLDER / dataset
    settings: dict[str, Any] = {
        "split": {"kind": "leave_last_out"},
        "order_column": "position",
        "filter": {"duplicates": "last"},
    }
    paths = [str(folder / "interactions.parquet")]
    if dataset != "beauty":
        test_path = str(folder / ("test.parquet" if dataset == "ml1m" else "test_*.parquet"))
        unit = "pair" if dataset == "ml1m" else "item"
        split = {"kind": "files", "test_paths": test_path, "validation_share": 0.1, "validation_unit": unit}
        settings, paths = {"split": split, "timestamp_column": None}, [str(folder / "train.parquet")]
    embeddings = None if dataset == "ml1m" else ingest_vectors(tmp_path, dataset)
    manifest_by_engine = ingest_with_both(tmp_path / "stage", *paths, embeddings=embeddings, **settings)
    assert manifest_by_engine["spark"].num_test_events > 0
