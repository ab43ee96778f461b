"""An event store in several shards has the results of a store with one shard; rows may have more than 32 bits."""

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

SHARDS = (1, 3, 8)
USERS, ITEMS, EVENTS = 41, 23, 900
SETTINGS: dict[str, Any] = {
    "split": {"kind": "leave_last_out"},
    "label_column": "stars",
    "label_threshold": 2,
    "explicit_negatives": True,
    "weight_column": "w",
    "context_columns": ("shop",),
    "filter": {"min_user_events": 2, "min_item_events": 2, "max_user_events": 40, "duplicates": "exact"},
}


def random_log(folder: Path, *, first_time: int = 0, users: int = USERS, seed: int = 0) -> str:
    random = np.random.default_rng(seed)
    user = (users * random.random(EVENTS) ** 2).astype(int)
    events = [
        (f"u{row}", int(item), first_time + at)
        for at, (row, item) in enumerate(zip(user, random.integers(0, ITEMS, EVENTS), strict=True))
    ]
    columns = {"stars": random.integers(1, 6, EVENTS).tolist(), "w": random.random(EVENTS).astype(np.float32).tolist()}
    return write_log(folder / f"log-{first_time}.parquet", events, **columns, shop=[f"shop {at % 7}" for at in range(EVENTS)])


def contents(manifest: InteractionsManifest, scratch_path: Path) -> dict[str, Any]:
    """Return what the consumers of an event store read, without the indices of events in the log."""
    store = EventStore.open(manifest)
    users, negatives = np.arange(store.num_users), store.known_negatives
    assert negatives is not None
    user_E, event_E = store.training_events(np.arange(store.num_train_events))
    context = pa.concat_tables([pq.read_table(path) for path in context_paths(manifest)])
    held_out_user_E, held_out_E = store.held_out_events(skip_validation_U=users % 2 == 0)
    histories = store.histories(event_E, user_E, max_history=5)
    drawn = negatives.at_events(event_E, user_E, max_items=3, draw_B=np.full(len(event_E), 0.4))
    chunk_user_E, chunk_event_E = (np.concatenate(arrays) for arrays in zip(*store.train_chunks(), strict=True))
    assert np.array_equal(chunk_user_E, user_E) and np.array_equal(chunk_event_E, event_E)
    is_training_E = store.is_training(slice(0, int(store.event_count_U.sum())))
    assert is_training_E.sum() == store.num_train_events and is_training_E[event_E].all()
    values: dict[str, Any] = {
        "user": user_E,
        "item": store.items_at(event_E),
        "time": store.times_at(event_E),
        "weight": store.example_weights(event_E, user_E, user_exponent=-0.5),
        "mean_weight": store.mean_weight(user_exponent=-0.5),
        "shop": np.array(context["shop"].take(pa.array(event_E)).to_pylist()),
        "history": (histories.offset, histories.values_L),
        "negatives": (drawn.offset, drawn.values_L),
        "held_out": (held_out_user_E, store.items_at(held_out_E), store.times_at(held_out_E)),
        "counts": (
            store.train_count_U,
            store.event_count_U,
            store.event_count_I(),
            store.train_count_I,
            store.popularity_rank_I,
        ),
        "train_negatives": negatives.num_train_negatives_U,
        "newest": store.newest_training_time(),
        "all_histories": [np.array(array) for array in store.all_histories(scratch_path)],
    }
    for split in ("validation", "test"):
        lists = (store.targets(users, split), store.items_before(users, split, max_items=7), negatives.before(users, split))
        values[split] = [array for ragged in lists for array in (ragged.offset, ragged.values_L)]
        values[split] += [store.users_with_targets(split), store.item_counts_before(split), store.first_time(split)]
        first_event_U = store.first_event_index(store.users_with_targets(split), split)
        values[split] += [np.array(context["shop"].take(pa.array(first_event_U)).to_pylist())]
    return values


def same(one: InteractionsManifest, other: InteractionsManifest) -> None:
    expected, actual = (contents(manifest, manifest.folder.with_suffix(".npy")) for manifest in (one, other))
    for name, values in expected.items():
        is_one_value = not isinstance(values, tuple | list)
        pairs = [(values, actual[name])] if is_one_value else zip(values, actual[name], strict=True)
        for value, other_value in pairs:
            np.testing.assert_array_equal(value, other_value, err_msg=name)


@pytest.mark.parametrize("shards", SHARDS[1:])
def test_a_store_in_shards_has_the_results_of_one_shard(tmp_path: Path, shards: int) -> None:
    log = random_log(tmp_path)
    one, several = (ingest(tmp_path / f"{number}", log, shards=number, **SETTINGS) for number in (1, shards))
    assert one.num_known_negatives > 20 and one.shards == ()
    assert (several.num_shards, sum(shard.num_events for shard in several.shards)) == (
        shards,
        EventStore.open(one).event_count_U.sum(),
    )
    assert sum(shard.num_known_negatives for shard in several.shards) == one.num_known_negatives
    same(one, several)
    same(merge_splits(one, tmp_path / "merged"), merge_splits(several, tmp_path / "merged_shards"))


def test_one_shard_has_one_file_per_array(tmp_path: Path) -> None:
    log = random_log(tmp_path)
    one, three = (ingest(tmp_path / f"{number}", log, shards=number, **SETTINGS) for number in (1, 3))
    shared = one.files.keys() & three.files.keys()
    assert {"train_user.npy", "item_count.npy", "users.parquet"} <= shared
    assert all(one.files[name] == three.files[name] for name in shared if name.endswith(".npy"))
    divided = {"event_item.npy", "event_time.npy", "event_weight.npy", "user_offset.npy", "train_end.npy", "validation_end.npy"}
    divided |= {"negative_offset.npy", "negative_item.npy", "negative_event.npy", "context.parquet"}
    assert one.files.keys() - shared == divided
    names = {
        f"{name.split('.')[0]}.{shard}.{name.split('.')[1]}" for name in (*divided, "event_offset.npy") for shard in range(3)
    }
    assert three.files.keys() - shared == names


def test_consecutive_runs_may_have_different_numbers_of_shards(tmp_path: Path) -> None:
    logs = [random_log(tmp_path, first_time=EVENTS * day, users=USERS + 5 * day, seed=day) for day in range(3)]
    runs: list[InteractionsManifest] = []
    for day, shards in enumerate((2, 1, 5)):
        previous = runs[-1] if runs else None
        runs.append(ingest(tmp_path / f"run{day}", *logs[: day + 1], shards=shards, previous=previous, **SETTINGS))
    unsharded = None
    for day in range(3):
        unsharded = ingest(tmp_path / f"alone{day}", *logs[: day + 1], previous=unsharded, **SETTINGS)
    assert unsharded is not None and [run.num_files_read for run in runs] == [1, 1, 1] and runs[-1].run_number == 3
    same(unsharded, runs[-1])


def test_leaked_events_are_found_between_runs_with_different_numbers_of_shards(tmp_path: Path) -> None:
    log, settings = random_log(tmp_path), SETTINGS | {"filter": {}}
    champions, runs = (
        [ingest(tmp_path / f"{name}{shards}", log, shards=shards, **(settings | {"split": split})) for shards in (1, 4)]
        for name, split in (
            ("champion", {"kind": "time", "test_days": 1e-9, "validation_days": 0}),
            ("run", {"kind": "leave_last_out"}),
        )
    )
    counts = {count_leaked_events(run, champion=champion) for run in runs for champion in champions}
    assert len(counts) == 1 and counts.pop() > 20


def test_more_shards_than_users_leave_shards_empty(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.parquet", [(user, item, 10 * user + item) for user in range(3) for item in range(4)])
    one, many = (ingest(tmp_path / f"{shards}", log, split={"kind": "leave_last_out"}, shards=shards) for shards in (1, 64))
    assert [shard.num_events for shard in many.shards] == [4, 4, 4] + [0] * 61
    stores = [EventStore.open(manifest) for manifest in (one, many)]
    for split in ("validation", "test"):
        targets, same_targets = (store.targets(np.arange(3), split).values_L.tolist() for store in stores)
        assert targets == same_targets


@pytest.mark.parametrize("shards", [0, -1, 65])
def test_a_number_of_shards_out_of_range_is_rejected(shards: int) -> None:
    with pytest.raises(ValidationError, match=r"shards\n  Input should be (greater|less) than or equal to (1|64)"):
        InteractionsConfig(paths=("log",), timestamp_column="t", shards=shards)


def test_a_single_shard_has_the_fingerprint_of_configs_without_the_setting() -> None:
    config = InteractionsConfig(paths=("log",), timestamp_column="t")
    assert "shards" not in config.result_settings() and config.model_copy(update={"shards": 2}).result_settings()["shards"] == 2


def test_only_the_shards_of_the_selected_users_are_mapped(tmp_path: Path) -> None:
    manifest = ingest(tmp_path / "stage", random_log(tmp_path), shards=8, **SETTINGS)
    store = EventStore.open(manifest)
    users = np.arange(store.num_users)
    store.items_before(users[users % 8 < 2], "test")
    for parts in (store._event_item._shard_arrays, store._user_start._shard_arrays, store._validation_end._shard_arrays):
        assert isinstance(parts, ShardArrays) and parts.mapped_shards == (0, 1)
    assert store._event_time._shard_arrays.mapped_shards == ()


def test_a_growing_array_is_extended_and_cut(tmp_path: Path) -> None:
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


FIRST_FREE = 2**31 + 10


class LargeVocabularies(DuckdbEngine):
    """DuckdbEngine after runs with FIRST_FREE users and items, of which the newest is in the vocabulary."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        for side, id_type in self._id_types.items():
            newest_sql = "'newest'" if id_type == "string" else "-1"
            self._session.append(f"{side}_ids", f"SELECT {newest_sql}, {FIRST_FREE - 1}, {FIRST_FREE - 1}")
        self._may_have_idle_ids = True

    def sorted_events(self) -> Iterator[pa.RecordBatch]:
        raise StopAtEventsError(list(super().sorted_events()))


class StopAtEventsError(Exception):
    pass


def test_codes_and_rows_pass_2_to_the_31(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = [("ann", 5, 1), ("ann", 6, 2), ("ann", 5, 3), ("bob", 5, 4), ("bob", 7, 5), ("bob", 5, 6)]
    path = write_log(tmp_path / "log.parquet", events)
    config = InteractionsConfig(
        paths=(path,), timestamp_column="t", timestamp_unit="us", threads=1, split={"kind": "leave_last_out", "num_folds": 2}
    )
    monkeypatch.setattr("recsys_core.ingest.log.duckdb_engine.engine.DuckdbEngine", LargeVocabularies)
    with pytest.raises(StopAtEventsError) as caught:
        ingest_interactions(config, embeddings=None, folder=tmp_path / "stage")
    (batches,) = caught.value.args
    batch = pa.Table.from_batches(batches)
    assert (batch.schema.field("user_row").type, batch.schema.field("item_row").type) == (pa.int64(), pa.int64())
    ann, bob, five = FIRST_FREE, FIRST_FREE + 1, FIRST_FREE
    assert batch["user_row"].to_pylist() == [ann] * 3 + [bob] * 3
    assert sorted(zip(batch["position"].to_pylist(), batch["item_row"].to_pylist(), strict=True)) == [
        (1, five), (2, five + 1), (3, five), (4, five), (5, five + 2), (6, five),
    ]  # fmt: skip


class ManyIds(Vocabulary):
    """A vocabulary of FIRST_FREE + 10 ids, without the ids."""

    def __len__(self) -> int:
        return FIRST_FREE + 10


@pytest.mark.parametrize("shards", [1, 3])
def test_the_writer_stores_rows_above_2_to_the_31(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: int) -> None:
    """The counts of all users and items are sparse files of 51 GB."""

    def sparse(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return np.memmap(tmp_path / f"counts-{len(list(tmp_path.iterdir()))}", dtype, "w+", shape=shape)

    first = FIRST_FREE // 3 * 3  # in the first shard
    user_row, item_row = np.array([0, first, first, first + 1]), np.array([FIRST_FREE + 9, 3, 2**31, 2**31 - 1])
    batch = pa.record_batch({
        "user_row": user_row, "item_row": item_row, "split": np.array([0, 0, 2, 0], np.int8), "position": np.arange(4),
    })  # fmt: skip
    config = InteractionsConfig(paths=("log",), timestamp_column="t", shards=shards)
    users, items = (
        ManyIds(side, pa.chunked_array([pa.array([], pa.int64())]), np.zeros(0, np.int64)) for side in ("user", "item")
    )
    with monkeypatch.context() as patch:
        patch.setattr(
            "recsys_core.ingest.log.event_writer.np.zeros",
            lambda shape, dtype: sparse(shape, dtype) if shape[0] else np.empty(shape, dtype),
        )
        writer = EventWriter(tmp_path, users=users, items=items, config=config)
    writer.write_events([batch], num_events=4)
    stored = [np.load(path) for path in sorted(tmp_path.glob("event_item*.npy"))]
    assert len(stored) == shards and {array.dtype for array in stored} == {np.dtype(np.int64)}
    assert np.concatenate(stored).tolist() == item_row.tolist()
    assert writer.user_count_U3[first : first + 2].tolist() == [[1, 0, 1], [1, 0, 0]]
    assert writer.item_count_I3[item_row].tolist() == [[1, 0, 0], [1, 0, 0], [0, 0, 1], [1, 0, 0]]
