"""Ingest of valid logs: splits, times, orders, labels, vectors and files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from recsys_core.ingest.vectors.config import EmbeddingsConfig
from recsys_core.ingest.vectors.ingest import ingest_embeddings
from recsys_core.manifests import EmbeddingsManifest, InteractionsManifest
from recsys_core.manifests.stage_folder import MARKER_NAME
from recsys_core.units import DAY_US
from tests.recsys_core.ingest.interaction_logs import (
    Event,
    assert_stored_events,
    ingest,
    leave_last_out,
    read_store,
    split_by_time,
    write_log,
)
from tests.recsys_core.ingest.parquet_files import write_parquet

LEAVE_LAST_OUT = {"kind": "leave_last_out"}
BEAUTY_FOLDER = Path(__file__).parents[5] / "shared" / "data" / "beauty"

int64_ids = st.integers(-(2**63), 2**63 - 1)
id_strategies = st.sampled_from([int64_ids, st.text(min_size=1, max_size=3), st.integers(0, 3)])
times = st.integers(0, 40).map(lambda step: step * DAY_US // 4)


@st.composite
def logs(draw: st.DrawFn, min_events: int = 1) -> list[Event]:
    """Draw a log with few ids and few times, so that ids repeat and times often equal the bounds of splits."""
    users, items = (draw(st.lists(draw(id_strategies), min_size=2, max_size=6, unique=True)) for _ in range(2))
    log = draw(st.lists(st.tuples(st.sampled_from(users), st.sampled_from(items), times), min_size=min_events, max_size=30))
    return [(users[0], items[0], draw(times)), (users[1], items[1], draw(times)), *log]  # a log needs two users and two items


@settings(max_examples=25)
@given(log=logs(), test_days=st.sampled_from([0.25, 1.0, 1.3]), validation_days=st.sampled_from([0.0, 0.5, 2.0]))
def test_a_time_split_has_every_event_once_in_order(
    tmp_path_factory: pytest.TempPathFactory, log: list[Event], test_days: float, validation_days: float
) -> None:
    splits = split_by_time(log, test_days=test_days, validation_days=validation_days)
    assume(splits[0])
    folder = tmp_path_factory.mktemp("time")
    split = {"kind": "time", "test_days": test_days, "validation_days": validation_days}
    manifest = ingest(folder / "stage", write_log(folder / "log.parquet", log), split=split)
    assert_stored_events(manifest, splits)
    assert manifest.is_ordered and manifest.num_removed_events_by_filter == {}
    assert (manifest.num_items_with_vector, manifest.num_items_vector_only) == (0, 0)


@settings(max_examples=25)
@given(log=logs(), test_users=st.integers(1, 5))
def test_an_automatic_test_period_is_the_shortest_with_enough_users(
    tmp_path_factory: pytest.TempPathFactory, log: list[Event], test_users: int
) -> None:
    event_times = [time for _, _, time in log]
    max_days = max(1, (max(event_times) - min(event_times)) // (5 * DAY_US))  # a fifth of the log
    min_users = min(test_users, len({user for user, _, _ in log}))
    test_days = next(
        (
            days
            for days in range(1, max_days)
            if len({user for user, _, time in log if max(event_times) - time < days * DAY_US}) >= min_users
        ),
        max_days,
    )
    splits = split_by_time(log, test_days=test_days, validation_days=1.0)
    assume(splits[0])
    folder = tmp_path_factory.mktemp("auto")
    split = {"kind": "time", "test_users": test_users}
    manifest = ingest(folder / "stage", write_log(folder / "log.parquet", log), split=split)
    assert_stored_events(manifest, splits)
    assert manifest.test_days == test_days


@settings(max_examples=25)
@given(log=logs(), min_events=st.integers(3, 5))
def test_leave_last_out_has_every_event_once_in_order(
    tmp_path_factory: pytest.TempPathFactory, log: list[Event], min_events: int
) -> None:
    log += [(*log[0][:2], step * DAY_US) for step in range(min_events)]  # at least one user has test events
    splits = leave_last_out(log, min_events=min_events)
    folder = tmp_path_factory.mktemp("last")
    path = write_log(folder / "log.parquet", log)
    assert_stored_events(ingest(folder / "stage", path, split=LEAVE_LAST_OUT | {"min_events": min_events}), splits)


def test_each_user_has_held_out_events_in_one_fold(tmp_path: Path) -> None:
    num_users, num_folds = 100, 3
    log = [(user, item, user * 10 + item) for user in range(num_users) for item in range(3)]
    path = write_log(tmp_path / "log.parquet", log)
    users_by_fold = []
    for fold in range(num_folds):
        split = LEAVE_LAST_OUT | {"num_folds": num_folds, "fold": fold}
        manifest = ingest(tmp_path / f"stage{fold}", path, split=split)
        held_out_users = {user for user, _, _ in read_store(manifest).splits[2]}
        held_out_splits = leave_last_out([event for event in log if event[0] in held_out_users], min_events=3)
        train_events = [event for event in log if event[0] not in held_out_users]
        assert_stored_events(manifest, ([*held_out_splits[0], *train_events], *held_out_splits[1:]))
        users_by_fold.append(held_out_users)
    assert set.union(*users_by_fold) == set(range(num_users)) and sum(map(len, users_by_fold)) == num_users
    assert min(map(len, users_by_fold)) > 0.7 * num_users / num_folds  # the folds have similar sizes


@settings(max_examples=20)
@given(log=logs(min_events=3), train_end_draw=st.integers(0, 30), validation_end_draw=st.integers(0, 30))
def test_a_split_by_files_has_the_events_of_each_file(
    tmp_path_factory: pytest.TempPathFactory, log: list[Event], train_end_draw: int, validation_end_draw: int
) -> None:
    train_end = 1 + train_end_draw % (len(log) - 2)
    validation_end = train_end + 1 + validation_end_draw % (len(log) - train_end - 1)
    splits = (log[:train_end], log[train_end:validation_end], log[validation_end:])
    folder = tmp_path_factory.mktemp("files")
    train_path, validation_path, test_path = (
        write_log(folder / f"{index}.parquet", split_events) for index, split_events in enumerate(splits)
    )
    assert_stored_events(
        ingest(
            folder / "stage", train_path, split={"kind": "files", "validation_paths": validation_path, "test_paths": test_path}
        ),
        splits,
    )


def test_several_files_make_one_log(tmp_path: Path) -> None:
    log = [("ann", 5, 3), ("bob", 6, 1), ("ann", 7, 2), ("ann", 8, 1), ("ann", 5, 9)]
    for index, event in enumerate(log):
        write_log(tmp_path / "in" / f"{index}.parquet", [event], **({"extra": [1]} if index else {}))
    manifest = ingest(tmp_path / "stage", str(tmp_path / "in" / "*.parquet"), split=LEAVE_LAST_OUT)
    assert_stored_events(manifest, leave_last_out(log, min_events=3))
    assert [Path(source.path).name for source in manifest.sources] == [f"{index}.parquet" for index in range(5)]


def test_a_file_without_rows_is_recorded_with_0_rows(tmp_path: Path) -> None:
    log = [("ann", 5, 3), ("bob", 6, 1), ("ann", 7, 2), ("ann", 8, 1), ("ann", 5, 9)]
    write_log(tmp_path / "in" / "0.parquet", log[:2])
    pq.write_table(pq.read_table(tmp_path / "in" / "0.parquet").slice(0, 0), tmp_path / "in" / "1.parquet")
    write_log(tmp_path / "in" / "2.parquet", log[2:])
    manifest = ingest(tmp_path / "stage", str(tmp_path / "in"), split=LEAVE_LAST_OUT)
    assert_stored_events(manifest, leave_last_out(log, min_events=3))
    assert (manifest.num_files_read, [file.source.num_rows for file in manifest.parts[0].files]) == (3, [2, 0, 3])


@pytest.mark.parametrize("name", ["day[1].parquet", "day?.parquet", "day*.parquet", "day{1,2}.parquet", "d'ay\".parquet"])
def test_pattern_characters_in_file_names_are_read_literally(tmp_path: Path, name: str) -> None:
    log = [("ann", 5, 3), ("ann", 6, 4), ("ann", 7, 5)]
    write_log(tmp_path / "in" / name, log)
    write_log(tmp_path / "in" / "day1.parquet", [("bob", *event[1:]) for event in log])
    manifest = ingest(tmp_path / "run[1]" / "stage", str(tmp_path / "in" / "d*"), split=LEAVE_LAST_OUT)
    assert_stored_events(manifest, leave_last_out(log + [("bob", *event[1:]) for event in log], min_events=3))


def random_columns(num_rows: int = 300_000) -> dict[str, np.ndarray]:
    """Return the columns of a random log of 3,000 users, 500 items and 10 days."""
    rng = np.random.default_rng(3)
    return {
        "user_id": rng.integers(0, 3000, num_rows),
        "item_id": rng.zipf(1.5, num_rows) % 500,
        "t": rng.integers(0, 5000, num_rows) * DAY_US // 500,
    }


def test_the_files_are_identical_for_any_number_of_threads(tmp_path: Path) -> None:
    columns = random_columns()
    path = write_parquet(tmp_path / "log.parquet", row_group_size=30_000, **columns)
    manifests = [
        ingest(tmp_path / f"stage{num_threads}", path, split={"kind": "time"}, threads=num_threads) for num_threads in (1, 2, 4)
    ]
    # Parts are left out, because the order of their rows depends on the threads.
    first_files, *other_files = (
        {name: file for name, file in manifest.files.items() if "parts/" not in name} for manifest in manifests
    )
    assert other_files == [first_files, first_files]
    manifest = manifests[0]
    user_offset, item_E, time_E = (
        np.load(manifest.path(f"{name}.npy")) for name in ("user_offset", "event_item", "event_time")
    )
    users, items = (pq.read_table(manifest.path(f"{side}.parquet")).column("id").to_numpy() for side in ("users", "items"))
    stored_events = np.stack([np.repeat(users, np.diff(user_offset)), items[item_E], time_E])
    expected_events = np.stack(list(columns.values()))
    np.testing.assert_array_equal(stored_events[:, np.lexsort(stored_events)], expected_events[:, np.lexsort(expected_events)])
    user_E = np.repeat(np.arange(len(users)), np.diff(user_offset))
    assert (np.diff(time_E)[np.diff(user_E) == 0] >= 0).all()


TIMES_US = [1_700_000_000_123_456 + step * DAY_US for step in (0, 5, 9)]
TIMES_MS, TIMES_S = ([time_us // unit for time_us in TIMES_US] for unit in (1000, 1_000_000))
TIME_COLUMNS: dict[str, tuple[pa.Array, dict[str, str], int]] = {
    "us": (pa.array(TIMES_US, pa.timestamp("us")), {}, 1),
    "ns": (pa.array([time_us * 1000 for time_us in TIMES_US], pa.timestamp("ns")), {}, 1),
    "ms": (pa.array(TIMES_MS, pa.timestamp("ms")), {}, 1000),
    "us with zone": (pa.array(TIMES_US, pa.timestamp("us", tz="Asia/Kolkata")), {}, 1),
    "ns with zone": (pa.array([time_us * 1000 for time_us in TIMES_US], pa.timestamp("ns", tz="UTC")), {}, 1),
    "integer us": (pa.array(TIMES_US), {"timestamp_unit": "us"}, 1),
    "integer ns": (pa.array([time_us * 1000 for time_us in TIMES_US]), {"timestamp_unit": "ns"}, 1),
    "integer ms": (pa.array(TIMES_MS, pa.uint64()), {"timestamp_unit": "ms"}, 1000),
    "integer s": (pa.array(TIMES_S, pa.int32()), {"timestamp_unit": "s"}, 1_000_000),
    "date": (pa.array([time_us // DAY_US for time_us in TIMES_US], pa.int32()).cast(pa.date32()), {}, DAY_US),
}
"""For each case: the time column, the setting of its unit, and its resolution in microseconds."""


@pytest.mark.parametrize("case", TIME_COLUMNS)
def test_times_of_every_type_and_unit_are_stored_in_microseconds(tmp_path: Path, case: str) -> None:
    time_column, unit_settings, resolution_us = TIME_COLUMNS[case]
    path = write_parquet(tmp_path / "log.parquet", user_id=[1, 2, 3], item_id=[1, 2, 3], t=time_column)
    manifest = ingest(tmp_path / "stage", path, split={"kind": "time"}, **unit_settings)
    stored_times = np.load(manifest.path("event_time.npy"))
    assert stored_times.tolist() == [time_us // resolution_us * resolution_us for time_us in TIMES_US]
    assert manifest.first_time is not None and manifest.first_time.startswith("2023-11-14T")
    assert manifest.last_time is not None and manifest.last_time.endswith("+00:00")


@pytest.mark.parametrize("order_type", [pa.float32(), pa.int16(), pa.float64()])
def test_an_order_column_orders_the_events_without_a_time(tmp_path: Path, order_type: pa.DataType) -> None:
    order_column = pa.array([3, -1, 2, 0, 7], pa.float64()).cast(order_type)
    path = write_parquet(tmp_path / "log.parquet", user_id=[1] * 4 + [2], item_id=[30, 10, 25, 20, 10], sequence=order_column)
    manifest = ingest(tmp_path / "stage", path, split=LEAVE_LAST_OUT, order_column="sequence")
    assert [[item for _, item, _ in split_events] for split_events in read_store(manifest).splits] == [[10, 20, 10], [25], [30]]
    assert (manifest.is_ordered, manifest.first_time, "event_time.npy" in manifest.files) == (True, None, False)


@pytest.mark.parametrize(
    ("labels", "threshold"),
    [
        (pa.array([5.0, 2.9, 3.0, 4.0, 0.0, 9.0]), 3.0),
        (pa.array([5, 2, 3, 4, 0, 9]), 3.0),
        (pa.array([True, False, True, True, False, True]), 1.0),
    ],
    ids=["float", "integer", "boolean"],
)
def test_events_below_the_label_threshold_are_counted_and_left_out(tmp_path: Path, labels: pa.Array, threshold: float) -> None:
    log = [*((1, item, item) for item in range(5)), (2, 0, 0)]
    path = write_log(tmp_path / "log.parquet", log, stars=labels)
    manifest = ingest(tmp_path / "stage", path, split=LEAVE_LAST_OUT, label_column="stars", label_threshold=threshold)
    assert_stored_events(manifest, leave_last_out([log[0], log[2], log[3], log[5]], min_events=3))
    assert manifest.num_removed_events_by_filter == {"below_threshold": 2}


def test_a_float32_label_that_equals_a_limit_is_within_the_limit(tmp_path: Path) -> None:
    log = [*((1, item, item) for item in range(5)), (2, 0, 0)]
    labels = pa.array([0.7, 0.69, 0.9, 0.6, 0.8, 1.1], pa.float32())
    label_settings = {"label_column": "score", "label_threshold": 0.7, "label_range": (0.6, 1.1)}
    path = write_log(tmp_path / "log.parquet", log, score=labels)
    manifest = ingest(tmp_path / "stage", path, split=LEAVE_LAST_OUT, **label_settings)
    assert_stored_events(manifest, leave_last_out([log[0], log[2], log[4], log[5]], min_events=3))
    assert manifest.num_removed_events_by_filter == {"below_threshold": 2}


def test_the_label_threshold_applies_to_test_files_too(tmp_path: Path) -> None:
    train_path = write_log(tmp_path / "a.parquet", [(1, 1, 1), (1, 2, 2), (2, 1, 1)], stars=[5, 1, 5])
    test_path = write_log(tmp_path / "b.parquet", [(1, 3, 3), (1, 4, 4)], stars=[1, 5])
    manifest = ingest(
        tmp_path / "stage",
        train_path,
        split={"kind": "files", "test_paths": test_path},
        label_column="stars",
        label_threshold=2,
    )
    assert_stored_events(manifest, ([(1, 1, 1), (2, 1, 1)], [], [(1, 4, 4)]))
    assert manifest.num_removed_events_by_filter == {"below_threshold": 2}


def test_the_validation_share_is_taken_from_train_only_and_is_reproducible(tmp_path: Path) -> None:
    log = [(user, item, item) for user in range(100) for item in range(50)]
    train_path = write_log(tmp_path / "train.parquet", log)
    reversed_path = write_log(tmp_path / "reversed.parquet", log[::-1])
    test_path = write_log(tmp_path / "test.parquet", [(1, 60, 60)])
    split = {"kind": "files", "test_paths": test_path, "validation_share": 0.2}
    manifest = ingest(tmp_path / "stage", train_path, split=split)
    store = read_store(manifest)
    assert read_store(ingest(tmp_path / "reversed", reversed_path, split=split)) == store
    # 1,000 validation events are expected, and 150 are five standard deviations.
    assert 850 < manifest.num_validation_events < 1150
    assert sorted(store.splits[0] + store.splits[1]) == log
    assert len({user for user, _, _ in store.splits[1]}) > 90


@pytest.mark.parametrize("id_type", [str, int])
def test_held_out_items_have_no_training_events_and_are_the_same_in_every_run(tmp_path: Path, id_type: type) -> None:
    log = [(user, id_type(item), item) for user in range(5) for item in range(1000)]
    log_path = write_log(tmp_path / "a.parquet", log)
    test_path = write_log(tmp_path / "test.parquet", [(1, id_type(60), 60), (1, id_type(1000), 60)])
    split = {"kind": "files", "test_paths": test_path, "validation_share": 0.2, "validation_unit": "item"}
    earlier_manifest = ingest(tmp_path / "earlier", log_path, split=split)
    train_events, validation_events, test_events = read_store(earlier_manifest).splits
    held_out_items = {item for _, item, _ in validation_events}
    assert not held_out_items & {item for _, item, _ in train_events}
    assert sorted(train_events + validation_events) == sorted(log)  # all events of an item are on one side
    assert 137 < len(held_out_items) < 263  # 200 are expected, and 63 are five standard deviations
    assert sorted(test_events) == sorted([(1, id_type(60), 60), (1, id_type(1000), 60)])

    # The next run reads one more file and holds out the same items. A run from scratch has the same splits.
    new_log_path = write_log(
        tmp_path / "b.parquet", [(user, id_type(item), 2000) for user in (7, 8) for item in range(900, 1100)]
    )
    later_manifest = ingest(tmp_path / "later", log_path, new_log_path, split=split, previous=earlier_manifest)
    assert later_manifest.num_files_read == 1
    train_events, validation_events, _ = read_store(later_manifest).splits
    later_held_out_items = {item for _, item, _ in validation_events}
    assert not later_held_out_items & {item for _, item, _ in train_events}
    assert {item for item in later_held_out_items if int(item) < 1000} == held_out_items
    rebuilt_splits = read_store(ingest(tmp_path / "rebuilt", log_path, new_log_path, split=split)).splits
    assert [*map(sorted, rebuilt_splits)] == [*map(sorted, read_store(later_manifest).splits)]


def test_after_a_change_of_the_split_the_whole_log_is_read_again(tmp_path: Path) -> None:
    log_path = write_log(tmp_path / "a.parquet", [(user, item, item) for user in range(20) for item in range(20)])
    split = {"kind": "files", "test_paths": write_log(tmp_path / "test.parquet", [(1, 60, 60)]), "validation_share": 0.5}
    first_manifest = ingest(tmp_path / "pairs", log_path, split=split)
    second_manifest = ingest(tmp_path / "items", log_path, split=split | {"validation_unit": "item"}, previous=first_manifest)
    assert second_manifest.num_files_read == 2  # the log and the test file
    train_events, validation_events, _ = read_store(second_manifest).splits
    assert validation_events and not {item for _, item, _ in validation_events} & {item for _, item, _ in train_events}


def test_a_log_without_order_has_the_events_of_each_user_together_in_a_random_order(tmp_path: Path) -> None:
    train_path = write_log(tmp_path / "a.parquet", log := [(user, item, 0) for item in range(20) for user in range(5)])
    test_path = write_log(tmp_path / "b.parquet", [(0, 99, 0)])
    manifest = ingest(tmp_path / "stage", train_path, split={"kind": "files", "test_paths": test_path}, timestamp_column=None)
    assert_stored_events(manifest, (log, [], [(0, 99, 0)]))
    item_orders = {tuple(item for user, item, _ in read_store(manifest).splits[0] if user == user_id) for user_id in range(5)}
    assert not manifest.is_ordered and len(item_orders) == 5


def ingest_vectors(folder: Path, item_ids: Sequence[Any]) -> EmbeddingsManifest:
    """Ingest the vectors [1], [2], ... of the items `item_ids`."""
    path = write_parquet(
        folder / "vectors.parquet", item_id=pa.array(item_ids), v=[[1.0 + row] for row in range(len(item_ids))]
    )
    return ingest_embeddings((EmbeddingsConfig(paths=path, vector_column="v"),), folder=folder / "embeddings")


@pytest.mark.parametrize("id_type", [str, int])
def test_items_with_a_vector_but_without_events_are_in_the_vocabulary(tmp_path: Path, id_type: type) -> None:
    def as_id(number: int) -> Any:
        return f"i{number}" if id_type is str else number

    log = [("u", as_id(3), 1), ("u", as_id(1), 2), ("u", as_id(3), 3), ("v", as_id(3), 3), ("u", as_id(5), 4)]
    embeddings = ingest_vectors(tmp_path / "run [1]'s", [as_id(number) for number in (9, 3, 7, 5)])
    path = write_log(tmp_path / "log.parquet", log)
    manifest = ingest(tmp_path / "stage", path, split={"kind": "leave_last_out"}, embeddings=embeddings)
    assert read_store(manifest).items == [as_id(number) for number in (3, 1, 5, 9, 7)]
    assert np.load(manifest.path("vector_row.npy")).tolist() == [1, -1, 3, 0, 2]
    assert (manifest.num_items_with_vector, manifest.num_items_vector_only) == (4, 2)


def test_column_names_may_have_any_characters(tmp_path: Path) -> None:
    column_settings = {"user_column": 'a "user"', "item_column": "x'); DROP TABLE log; --", "timestamp_column": "select"}
    column_settings |= {"label_column": "ü.label"}
    log = [("ann", 5, 3), ("ann", 6, 4), ("ann", 7, 5), ("bob", 5, 1)]
    columns = dict(zip(column_settings.values(), [*zip(*log, strict=True), (1, 1, 1, 1)], strict=True))
    path = write_parquet(tmp_path / "log.parquet", filename=[1] * 4, split=[7] * 4, position=[7] * 4, **columns)
    manifest = ingest(tmp_path / "stage", path, split=LEAVE_LAST_OUT, label_threshold=1, **column_settings)
    assert_stored_events(manifest, leave_last_out(log, min_events=3))


def test_the_spill_folder_is_deleted(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "log.parquet", **random_columns(1_000_000))
    manifest = ingest(tmp_path / "stage", path, split={"kind": "time"}, memory_limit="40MB", threads=1)
    file_names = {str(path.relative_to(manifest.folder)) for path in manifest.folder.rglob("*") if path.is_file()}
    assert file_names == {*manifest.files, "manifest.json", MARKER_NAME}
    assert {path.name for path in manifest.folder.iterdir() if path.is_dir()} == {"parts"}
    assert manifest.num_events == 1_000_000


def num_test_events_with_unseen_item(manifest: InteractionsManifest) -> dict[str, int]:
    """Return how many test events have an item without training events, and without training and validation events."""
    train_items, validation_items, test_items = (
        [item for _, item, _ in split_events] for split_events in read_store(manifest).splits
    )
    items_by_splits = {"train": set(train_items), "train and validation": {*train_items, *validation_items}}
    return {name: sum(item not in items for item in test_items) for name, items in items_by_splits.items()}


@pytest.mark.skipif(not BEAUTY_FOLDER.exists(), reason="the Beauty log is not on this machine")
def test_the_beauty_log_has_the_published_numbers_of_users_items_and_events(tmp_path: Path) -> None:
    embeddings = ingest_embeddings(
        (EmbeddingsConfig(paths=str(BEAUTY_FOLDER / "item_embeddings.parquet"), vector_column="embedding"),),
        folder=tmp_path / "vectors",
    )
    path = str(BEAUTY_FOLDER / "interactions.parquet")
    manifest = ingest(tmp_path / "stage", path, split=LEAVE_LAST_OUT, order_column="position", embeddings=embeddings)
    assert (manifest.num_users, manifest.num_items, manifest.num_items_with_vector) == (22_363, 12_101, 12_101)
    assert manifest.num_validation_events == manifest.num_test_events == 22_363  # one event of each user
    assert manifest.num_train_events == 198_502 - 2 * 22_363
    assert num_test_events_with_unseen_item(manifest) == {"train": 138, "train and validation": 52}
