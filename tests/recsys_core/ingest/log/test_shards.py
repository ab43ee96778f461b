"""Event stores in several shards, compared with stores in one shard, and row numbers that need more than 32 bits."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from recsys_core.dataset.events import EventStore
from recsys_core.dataset.layout import ShardArrays, context_paths
from recsys_core.errors import InputError
from recsys_core.ingest.log.config import InteractionsConfig
from recsys_core.ingest.log.duckdb_engine.engine import DuckdbEngine
from recsys_core.ingest.log.engine import Vocabulary
from recsys_core.ingest.log.event_writer import EventWriter, GrowingArray
from recsys_core.ingest.log.ingest import ingest_interactions
from recsys_core.ingest.log.merged_splits import merge_splits
from recsys_core.manifests import InteractionsManifest
from recsys_core.training.warm.leaked_events import count_leaked_events
from tests.recsys_core.ingest.interaction_logs import ingest, write_log

NUM_USERS, NUM_ITEMS, NUM_EVENTS = 41, 23, 900
SETTINGS: dict[str, Any] = {
    "split": {"kind": "leave_last_out"},
    "label_column": "stars",
    "label_threshold": 2,
    "explicit_negatives": True,
    "weight_column": "weight",
    "context_columns": ("shop",),
    "filter": {"min_user_events": 2, "min_item_events": 2, "max_user_events": 40, "duplicates": "exact"},
}


def write_random_log(folder: Path, *, first_time: int = 0, num_users: int = NUM_USERS, seed: int = 0) -> str:
    """Write a log with the columns that SETTINGS names. Its times are `first_time`, `first_time` + 1, ..."""
    rng = np.random.default_rng(seed)
    user_E = (num_users * rng.random(NUM_EVENTS) ** 2).astype(int)
    events = [
        (f"u{row}", int(item), first_time + index)
        for index, (row, item) in enumerate(zip(user_E, rng.integers(0, NUM_ITEMS, NUM_EVENTS), strict=True))
    ]
    columns = {"stars": rng.integers(1, 6, NUM_EVENTS).tolist(), "weight": rng.random(NUM_EVENTS).astype(np.float32).tolist()}
    return write_log(
        folder / f"log-{first_time}.parquet", events, **columns, shop=[f"shop {index % 7}" for index in range(NUM_EVENTS)]
    )


def contents_of(manifest: InteractionsManifest, scratch_path: Path) -> dict[str, Any]:
    """Return all values that readers of an event store use. Event indices are left out, because they depend on the shards."""
    store = EventStore.open(manifest)
    user_U, negatives = np.arange(store.num_users), store.known_negatives
    assert negatives is not None
    user_E, event_E = store.training_events(np.arange(store.num_train_events))
    context = pa.concat_tables([pq.read_table(path) for path in context_paths(manifest)])
    held_out_user_E, held_out_event_E = store.held_out_events(skip_validation_U=user_U % 2 == 0)
    histories = store.histories(event_E, user_E, max_history=5)
    drawn_negatives = negatives.at_events(event_E, user_E, max_items=3, draw_B=np.full(len(event_E), 0.4))
    chunk_user_E, chunk_event_E = (np.concatenate(arrays) for arrays in zip(*store.train_chunks(), strict=True))
    assert np.array_equal(chunk_user_E, user_E) and np.array_equal(chunk_event_E, event_E)
    is_training_E = store.is_training(slice(0, int(store.event_count_U.sum())))
    assert is_training_E.sum() == store.num_train_events and is_training_E[event_E].all()
    contents: dict[str, Any] = {
        "user": user_E,
        "item": store.items_at(event_E),
        "time": store.times_at(event_E),
        "weight": store.example_weights(event_E, user_E, user_exponent=-0.5),
        "mean_weight": store.mean_weight(user_exponent=-0.5),
        "shop": np.array(context["shop"].take(pa.array(event_E)).to_pylist()),
        "history": (histories.offset, histories.values_L),
        "negatives": (drawn_negatives.offset, drawn_negatives.values_L),
        "held_out": (held_out_user_E, store.items_at(held_out_event_E), store.times_at(held_out_event_E)),
        "counts": (
            store.train_count_U,
            store.event_count_U,
            store.event_count_I(),
            store.train_count_I,
            store.popularity_rank_I,
        ),
        "train_negatives": negatives.num_train_negatives_U,
        "newest": (store.newest_training_time(), store.newest_times()),
        "all_histories": [np.array(array) for array in store.all_histories(scratch_path)],
    }
    for split in ("validation", "test"):
        jagged_arrays = (
            store.targets(user_U, split),
            store.items_before(user_U, split, max_items=7),
            negatives.before(user_U, split),
        )
        contents[split] = [array for jagged in jagged_arrays for array in (jagged.offset, jagged.values_L)]
        contents[split] += [store.users_with_targets(split), store.item_counts_before(split), store.first_time(split)]
        first_event_U = store.first_event_index(store.users_with_targets(split), split)
        contents[split] += [np.array(context["shop"].take(pa.array(first_event_U)).to_pylist())]
    return contents


def assert_same_contents(manifest: InteractionsManifest, other_manifest: InteractionsManifest) -> None:
    """Assert that the stores of two stages have equal contents."""
    expected_contents = contents_of(manifest, manifest.folder.with_suffix(".npy"))
    contents = contents_of(other_manifest, other_manifest.folder.with_suffix(".npy"))
    for name, expected_arrays in expected_contents.items():
        has_several_arrays = isinstance(expected_arrays, tuple | list)
        pairs = zip(expected_arrays, contents[name], strict=True) if has_several_arrays else [(expected_arrays, contents[name])]
        for expected_array, array in pairs:
            np.testing.assert_array_equal(array, expected_array, err_msg=name)


@pytest.mark.parametrize("num_shards", [3, 8])
def test_a_store_in_shards_has_the_contents_of_a_store_with_one_shard(tmp_path: Path, num_shards: int) -> None:
    log_path = write_random_log(tmp_path)
    plain_manifest, sharded_manifest = (
        ingest(tmp_path / f"{shard_count}", log_path, shards=shard_count, **SETTINGS) for shard_count in (1, num_shards)
    )
    assert plain_manifest.num_known_negatives > 20 and plain_manifest.shards == ()
    assert sharded_manifest.num_shards == num_shards
    num_events = EventStore.open(plain_manifest).event_count_U.sum()
    assert sum(shard.num_events for shard in sharded_manifest.shards) == num_events
    assert sum(shard.num_known_negatives for shard in sharded_manifest.shards) == plain_manifest.num_known_negatives
    assert_same_contents(plain_manifest, sharded_manifest)
    assert_same_contents(
        merge_splits(plain_manifest, tmp_path / "merged"), merge_splits(sharded_manifest, tmp_path / "merged_shards")
    )


def test_only_the_arrays_of_users_and_events_have_a_file_per_shard(tmp_path: Path) -> None:
    log_path = write_random_log(tmp_path)
    plain_manifest, sharded_manifest = (
        ingest(tmp_path / f"{num_shards}", log_path, shards=num_shards, **SETTINGS) for num_shards in (1, 3)
    )
    shared_names = plain_manifest.files.keys() & sharded_manifest.files.keys()
    assert {"train_user.npy", "item_count.npy", "users.parquet"} <= shared_names
    assert all(plain_manifest.files[name] == sharded_manifest.files[name] for name in shared_names if name.endswith(".npy"))
    divided_arrays = ("event_item", "event_time", "event_weight", "user_offset", "train_end", "validation_end")
    divided_names = {f"{name}.npy" for name in (*divided_arrays, "negative_offset", "negative_item", "negative_event")}
    divided_names.add("context.parquet")
    assert plain_manifest.files.keys() - shared_names == divided_names
    shard_file_names = {
        f"{name.split('.')[0]}.{shard}.{name.split('.')[1]}"
        for name in (*divided_names, "event_offset.npy")
        for shard in range(3)
    }
    assert sharded_manifest.files.keys() - shared_names == shard_file_names


def test_consecutive_runs_may_have_different_numbers_of_shards(tmp_path: Path) -> None:
    log_paths = [
        write_random_log(tmp_path, first_time=NUM_EVENTS * day, num_users=NUM_USERS + 5 * day, seed=day) for day in range(3)
    ]
    manifests: list[InteractionsManifest] = []
    for day, num_shards in enumerate((2, 1, 5)):
        previous = manifests[-1] if manifests else None
        manifests.append(
            ingest(tmp_path / f"run{day}", *log_paths[: day + 1], shards=num_shards, previous=previous, **SETTINGS)
        )
    plain_manifest = None
    for day in range(3):
        plain_manifest = ingest(tmp_path / f"plain{day}", *log_paths[: day + 1], previous=plain_manifest, **SETTINGS)
    assert plain_manifest is not None and manifests[-1].run_number == 3
    assert [manifest.num_files_read for manifest in manifests] == [1, 1, 1]
    assert_same_contents(plain_manifest, manifests[-1])


def test_leaked_events_are_found_between_runs_with_different_numbers_of_shards(tmp_path: Path) -> None:
    log_path, settings = write_random_log(tmp_path), SETTINGS | {"filter": {}}
    champion_manifests, manifests = (
        [
            ingest(tmp_path / f"{name}{num_shards}", log_path, shards=num_shards, **(settings | {"split": split}))
            for num_shards in (1, 4)
        ]
        for name, split in (
            ("champion", {"kind": "time", "test_days": 1e-9, "validation_days": 0}),
            ("run", {"kind": "leave_last_out"}),
        )
    )
    num_leaked_events = {
        count_leaked_events(manifest, champion=champion) for manifest in manifests for champion in champion_manifests
    }
    assert len(num_leaked_events) == 1 and num_leaked_events.pop() > 20


def test_more_shards_than_users_leave_shards_empty(tmp_path: Path) -> None:
    log_path = write_log(tmp_path / "log.parquet", [(user, item, 10 * user + item) for user in range(3) for item in range(4)])
    plain_manifest, sharded_manifest = (
        ingest(tmp_path / f"{num_shards}", log_path, split={"kind": "leave_last_out"}, shards=num_shards)
        for num_shards in (1, 64)
    )
    assert [shard.num_events for shard in sharded_manifest.shards] == [4, 4, 4] + [0] * 61
    stores = [EventStore.open(manifest) for manifest in (plain_manifest, sharded_manifest)]
    for split in ("validation", "test"):
        plain_targets, sharded_targets = (store.targets(np.arange(3), split).values_L.tolist() for store in stores)
        assert plain_targets == sharded_targets


@pytest.mark.parametrize("num_shards", [0, -1, 65])
def test_a_number_of_shards_out_of_range_is_rejected(num_shards: int) -> None:
    with pytest.raises(ValidationError, match=r"shards\n  Input should be (greater|less) than or equal to (1|64)"):
        InteractionsConfig(paths=("log",), timestamp_column="t", shards=num_shards)


def test_the_number_of_shards_is_part_of_the_fingerprint_unless_it_is_1() -> None:
    config = InteractionsConfig(paths=("log",), timestamp_column="t")
    assert "shards" not in config.result_settings() and config.model_copy(update={"shards": 2}).result_settings()["shards"] == 2


def test_only_the_shards_of_the_requested_users_are_mapped(tmp_path: Path) -> None:
    manifest = ingest(tmp_path / "stage", write_random_log(tmp_path), shards=8, **SETTINGS)
    store = EventStore.open(manifest)
    user_U = np.arange(store.num_users)
    store.items_before(user_U[user_U % 8 < 2], "test")
    for arrays in (store._event_item._shard_arrays, store._user_start._shard_arrays, store._validation_end._shard_arrays):
        assert isinstance(arrays, ShardArrays) and {*arrays._array_by_shard} == {0, 1}
    assert store._event_time._shard_arrays._array_by_shard == {}


def test_a_growing_array_has_the_appended_values_for_any_expected_length(tmp_path: Path) -> None:
    path, values = tmp_path / "values.npy", np.arange(1_000, dtype=np.int32)
    for expected_length in (0, 10, 1_000, 5_000):
        array = GrowingArray(path, dtype=np.int32, expected_length=expected_length)
        for start, stop in pairwise((0, 1, 30, 31, 700, 1_000)):
            array.append(values[start:stop])
        array.close()
        np.save(tmp_path / "expected.npy", values)
        assert path.read_bytes() == (tmp_path / "expected.npy").read_bytes()


def test_a_growing_array_on_a_full_disk_is_an_error(small_disk: Path) -> None:
    array = GrowingArray(small_disk / "values.npy", dtype=np.int64, expected_length=10)
    with pytest.raises(InputError, match=r"values.npy, 10,000,000 numbers, takes 0.075 GiB, but the disk has"):
        array.append(np.zeros(10_000_000, np.int64))


FIRST_NEW_ROW = 2**31 + 10
"""Row of the first user and item that a run adds to the large vocabularies."""


class LargeVocabulariesEngine(DuckdbEngine):
    """A DuckdbEngine that has FIRST_NEW_ROW users and items, but only the newest user and item are in its tables."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        for side, id_type in self._id_types.items():
            newest_sql = "'newest'" if id_type == "string" else "-1"
            self._session.append(f"{side}_ids", f"SELECT {newest_sql}, {FIRST_NEW_ROW - 1}, {FIRST_NEW_ROW - 1}")
        self._is_filtered = True

    def sorted_events(self) -> Iterator[pa.RecordBatch]:
        raise StopAtEventsError(list(super().sorted_events()))


class StopAtEventsError(Exception):
    """Ends the ingest before the events are written. The argument is the list of event batches."""


def test_new_ids_may_have_codes_and_rows_above_2_to_the_31(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = [("ann", 5, 1), ("ann", 6, 2), ("ann", 5, 3), ("bob", 5, 4), ("bob", 7, 5), ("bob", 5, 6)]
    path = write_log(tmp_path / "log.parquet", log)
    config = InteractionsConfig(
        paths=(path,), timestamp_column="t", timestamp_unit="us", threads=1, split={"kind": "leave_last_out", "num_folds": 2}
    )
    monkeypatch.setattr("recsys_core.ingest.log.duckdb_engine.engine.DuckdbEngine", LargeVocabulariesEngine)
    with pytest.raises(StopAtEventsError) as error_info:
        ingest_interactions(config, embeddings=None, folder=tmp_path / "stage")
    (batches,) = error_info.value.args
    events_table = pa.Table.from_batches(batches)
    assert (events_table.schema.field("user_row").type, events_table.schema.field("item_row").type) == (pa.int64(), pa.int64())
    ann_row, bob_row, row_of_5 = FIRST_NEW_ROW, FIRST_NEW_ROW + 1, FIRST_NEW_ROW
    assert events_table["user_row"].to_pylist() == [ann_row] * 3 + [bob_row] * 3
    assert sorted(zip(events_table["position"].to_pylist(), events_table["item_row"].to_pylist(), strict=True)) == [
        (1, row_of_5), (2, row_of_5 + 1), (3, row_of_5), (4, row_of_5), (5, row_of_5 + 2), (6, row_of_5),
    ]  # fmt: skip


class LargeVocabulary(Vocabulary):
    """A vocabulary with the length FIRST_NEW_ROW + 10 that stores no ids."""

    def __len__(self) -> int:
        return FIRST_NEW_ROW + 10


@pytest.mark.parametrize("num_shards", [1, 3])
def test_the_writer_stores_rows_above_2_to_the_31(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_shards: int) -> None:
    """The counts per user and per item are sparse files, because they would take 51 GB of memory."""

    def create_sparse_array(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return np.memmap(tmp_path / f"counts-{len(list(tmp_path.iterdir()))}", dtype, "w+", shape=shape)

    user_in_first_shard = FIRST_NEW_ROW // 3 * 3  # a multiple of 3, so that the user is in the first of 3 shards
    user_row = np.array([0, user_in_first_shard, user_in_first_shard, user_in_first_shard + 1])
    item_row = np.array([FIRST_NEW_ROW + 9, 3, 2**31, 2**31 - 1])
    batch = pa.record_batch({
        "user_row": user_row, "item_row": item_row, "split": np.array([0, 0, 2, 0], np.int8), "position": np.arange(4),
    })  # fmt: skip
    config = InteractionsConfig(paths=("log",), timestamp_column="t", shards=num_shards)
    users, items = (
        LargeVocabulary(side, pa.chunked_array([pa.array([], pa.int64())]), np.zeros(0, np.int64)) for side in ("user", "item")
    )
    with monkeypatch.context() as patch:
        patch.setattr(
            "recsys_core.ingest.log.event_writer.np.zeros",
            lambda shape, dtype: create_sparse_array(shape, dtype) if shape[0] else np.empty(shape, dtype),
        )
        writer = EventWriter(tmp_path, users=users, items=items, config=config)
    writer.write_events([batch], num_events=4)
    items_by_shard = [np.load(path) for path in sorted(tmp_path.glob("event_item*.npy"))]
    assert len(items_by_shard) == num_shards and {array.dtype for array in items_by_shard} == {np.dtype(np.int64)}
    assert np.concatenate(items_by_shard).tolist() == item_row.tolist()
    assert writer.user_count_U3[user_in_first_shard : user_in_first_shard + 2].tolist() == [[1, 0, 1], [1, 0, 0]]
    assert writer.item_count_I3[item_row].tolist() == [[1, 0, 0], [1, 0, 0], [0, 0, 1], [1, 0, 0]]
