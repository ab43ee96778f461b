"""Incremental ingest, in which a run continues the vocabularies and the parts of the previous run."""

import errno
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys_core.dataset.events import EventStore
from recsys_core.ingest.log import incremental
from recsys_core.ingest.log.duckdb_engine.engine import DuckdbEngine
from recsys_core.manifests import InteractionsManifest
from recsys_core.units import DAY_US
from tests.recsys_core.ingest.interaction_logs import Event, ingest, read_store, write_log
from tests.recsys_core.ingest.parquet_files import raises_input_error, write_parquet

TIME_SPLIT = {"kind": "time", "test_days": 1, "validation_days": 1}
EVENTS_BY_DAY: list[list[Event]] = [
    [("ann", "x", 1), ("bob", "x", 2), ("ann", "y", 3)],
    [("bob", "y", DAY_US), ("cat", "z", DAY_US + 1), ("ann", "x", DAY_US + 2)],
    [("ann", "z", 2 * DAY_US), ("bob", "x", 2 * DAY_US + 1), ("cat", "x", 2 * DAY_US + 2)],
    [("dan", "w", 3 * DAY_US), ("ann", "w", 3 * DAY_US + 1), ("dan", "x", 3 * DAY_US + 2)],
]
"""Events of four days, a list for each day. The user dan and the item w are new on the last day."""


def write_days(folder: Path, events_by_day: list[list[Event]]) -> str:
    """Write a file for each day that has no file yet. Return a glob of all files."""
    for day, events in enumerate(events_by_day):
        path = folder / f"day{day}.parquet"
        if not path.exists():
            write_log(path, events)
    return str(folder / "*.parquet")


def ingest_in_two_runs(
    folder: Path, *, split: dict[str, Any] = TIME_SPLIT, **settings: Any
) -> tuple[InteractionsManifest, InteractionsManifest]:
    """Ingest three days in a first run, and a fourth day in a second run. Return both manifests."""
    first_manifest = ingest(folder / "run1", write_days(folder / "in", EVENTS_BY_DAY[:3]), split=split, **settings)
    log_glob = write_days(folder / "in", EVENTS_BY_DAY)
    return first_manifest, ingest(folder / "run2", log_glob, split=split, previous=first_manifest, **settings)


def row_by_id(manifest: InteractionsManifest, side: str) -> dict[Any, int]:
    """Return the vocabulary. side: "users" or "items"."""
    ids = pq.read_table(manifest.path(f"{side}.parquet")).column("id").to_pylist()
    return {id_: row for row, id_ in enumerate(ids)}


def assert_same_events(manifest: InteractionsManifest, other_manifest: InteractionsManifest) -> None:
    """Assert that two stages have the same events in each split."""
    for events, other_events in zip(read_store(manifest).splits, read_store(other_manifest).splits, strict=True):
        assert sorted(events) == sorted(other_events)


def test_only_the_new_day_is_read_and_every_id_keeps_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file_names_by_part: list[list[str]] = []
    read_part = incremental.read_part

    def record_files(*args: Any, sources: Any, **kwargs: Any) -> Any:
        file_names_by_part.append([Path(source.name).name for source in sources])
        return read_part(*args, sources=sources, **kwargs)

    monkeypatch.setattr(incremental, "read_part", record_files)
    first_manifest, second_manifest = ingest_in_two_runs(tmp_path)
    assert file_names_by_part == [["day0.parquet", "day1.parquet", "day2.parquet"], ["day3.parquet"]]
    assert (first_manifest.num_files_read, first_manifest.num_rows_read) == (3, 9)
    assert (second_manifest.num_files_read, second_manifest.num_rows_read) == (1, 3)
    for side in ("users", "items"):
        assert row_by_id(first_manifest, side).items() <= row_by_id(second_manifest, side).items()
    assert list(row_by_id(second_manifest, "users"))[3:] == ["dan"] and list(row_by_id(second_manifest, "items"))[3:] == ["w"]
    assert (first_manifest.lineage, first_manifest.run_number, second_manifest.run_number) == (second_manifest.lineage, 1, 2)
    assert second_manifest.rebuild_reason is None
    assert_same_events(second_manifest, ingest(tmp_path / "whole", str(tmp_path / "in" / "*.parquet"), split=TIME_SPLIT))


def test_events_at_the_same_time_are_in_the_order_of_their_items(tmp_path: Path) -> None:
    """An item that an earlier run has read comes first. New items are sorted by their number of events, largest first."""
    first_file_events: list[Event] = [("bob", "c", 1), ("bob", "d", 2), ("cat", "d", 3 * DAY_US)]
    tied_events: list[Event] = [("ann", item, 5) for item in ("d", "b", "c", "a", "e")]
    second_file_events = [*tied_events, ("bob", "b", 6), ("bob", "e", 7), ("cat", "e", 8)]
    first_log_glob = write_days(tmp_path / "in", [first_file_events])
    first_manifest = ingest(tmp_path / "run1", first_log_glob, split=TIME_SPLIT)
    log_glob = write_days(tmp_path / "in", [first_file_events, second_file_events])
    manifest = ingest(tmp_path / "run2", log_glob, split=TIME_SPLIT, previous=first_manifest)
    ann_row = row_by_id(manifest, "users")["ann"]
    item_rows = EventStore.open(manifest).items_before(np.array([ann_row]), "test").values_L
    items = [*row_by_id(manifest, "items")]
    assert [items[row] for row in item_rows] == ["d", "c", "e", "b", "a"]


def test_a_part_of_the_previous_run_is_a_hard_link(tmp_path: Path) -> None:
    first_manifest, second_manifest = ingest_in_two_runs(tmp_path)
    assert [part.file_name for part in first_manifest.parts] == [second_manifest.parts[0].file_name]
    assert first_manifest.path(first_manifest.parts[0].file_name).samefile(
        second_manifest.path(second_manifest.parts[0].file_name)
    )


def test_a_run_without_new_files_reads_no_file(tmp_path: Path) -> None:
    first_manifest, _ = ingest_in_two_runs(tmp_path)
    (tmp_path / "in" / "day3.parquet").unlink()
    second_manifest = ingest(tmp_path / "again", str(tmp_path / "in" / "*.parquet"), split=TIME_SPLIT, previous=first_manifest)
    assert (second_manifest.num_files_read, second_manifest.run_number) == (0, 2)
    assert read_store(second_manifest) == read_store(first_manifest)


def test_a_changed_file_replaces_its_earlier_events(tmp_path: Path) -> None:
    first_manifest, _ = ingest_in_two_runs(tmp_path)
    write_log(tmp_path / "in" / "day1.parquet", [("eve", "v", DAY_US), ("eve", "x", DAY_US + 1)])
    manifest = ingest(tmp_path / "again", str(tmp_path / "in" / "*.parquet"), split=TIME_SPLIT, previous=first_manifest)
    assert manifest.num_files_read == 2
    assert_same_events(manifest, ingest(tmp_path / "whole", str(tmp_path / "in" / "*.parquet"), split=TIME_SPLIT))


def test_events_of_deleted_files_are_removed_but_their_ids_keep_their_rows(tmp_path: Path) -> None:
    first_manifest = ingest(tmp_path / "run1", write_days(tmp_path / "in", EVENTS_BY_DAY), split=TIME_SPLIT)
    (tmp_path / "in" / "day3.parquet").unlink()
    manifest = ingest(tmp_path / "run2", str(tmp_path / "in" / "*.parquet"), split=TIME_SPLIT, previous=first_manifest)
    assert (manifest.num_files_read, manifest.num_users, manifest.num_idle_users, manifest.num_idle_items) == (0, 4, 1, 1)
    assert row_by_id(manifest, "users") == row_by_id(first_manifest, "users")
    assert sum(len(split_events) for split_events in read_store(manifest).splits) == 9


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"vocabulary": {"rebuild": "always"}}, "rebuild is always"),
        ({"vocabulary": {"rebuild_after_runs": 1}}, "number of runs with the same vocabularies: 1 ("),
    ],
)
def test_a_rebuild_numbers_ids_again_by_frequency(tmp_path: Path, settings: dict[str, Any], reason: str) -> None:
    first_manifest, second_manifest = ingest_in_two_runs(tmp_path, **settings)
    assert second_manifest.rebuild_reason is not None and reason in second_manifest.rebuild_reason
    assert (second_manifest.run_number, second_manifest.num_files_read) == (1, 4)
    assert second_manifest.lineage != first_manifest.lineage
    event_counts = [
        sum(event[1] == item for day in EVENTS_BY_DAY for event in day) for item in row_by_id(second_manifest, "items")
    ]
    assert event_counts == sorted(event_counts, reverse=True)


def test_a_rebuild_is_due_when_most_ids_are_idle(tmp_path: Path) -> None:
    first_manifest = ingest(tmp_path / "run1", write_days(tmp_path / "in", EVENTS_BY_DAY), split=TIME_SPLIT)
    for day in (0, 1):
        (tmp_path / "in" / f"day{day}.parquet").unlink()
    late_events_by_day = [[("new", "w", day * DAY_US), ("ann", "x", day * DAY_US)] for day in (20, 21, 22)]
    for day, events in enumerate(late_events_by_day):
        write_log(tmp_path / "in" / f"late{day}.parquet", events)
    log_glob = str(tmp_path / "in" / "late*.parquet")
    second_manifest = ingest(tmp_path / "run2", log_glob, split=TIME_SPLIT, previous=first_manifest)
    assert (second_manifest.rebuild_reason, second_manifest.num_idle_users, second_manifest.num_users) == (None, 3, 5)
    third_manifest = ingest(tmp_path / "run3", log_glob, split=TIME_SPLIT, previous=second_manifest)
    assert third_manifest.rebuild_reason is not None
    assert "3 of 5 users had no event in the previous run" in third_manifest.rebuild_reason
    assert (third_manifest.num_users, third_manifest.num_idle_users) == (2, 0)


def test_a_rebuild_is_due_when_most_items_have_neither_an_event_nor_a_vector(tmp_path: Path) -> None:
    old_path = write_log(tmp_path / "old.parquet", [("ann", item, 1) for item in "pqrstu"])
    new_path = write_log(tmp_path / "new.parquet", EVENTS_BY_DAY[0] + EVENTS_BY_DAY[1] + EVENTS_BY_DAY[2])
    manifest = ingest(tmp_path / "run1", old_path, new_path, split=TIME_SPLIT)
    for run_name in ("run2", "run3"):
        manifest = ingest(tmp_path / run_name, new_path, split=TIME_SPLIT, previous=manifest)
    assert manifest.rebuild_reason is not None
    assert "6 of 9 items had neither an event nor a vector in the previous run" in manifest.rebuild_reason


def test_with_a_new_label_column_all_files_are_read_again_and_ids_keep_their_rows(tmp_path: Path) -> None:
    for day, events in enumerate(EVENTS_BY_DAY):
        write_log(tmp_path / "in" / f"day{day}.parquet", events, stars=[5, 1, 5])
    log_glob = str(tmp_path / "in" / "*.parquet")
    first_manifest = ingest(tmp_path / "run1", log_glob, split=TIME_SPLIT)
    second_manifest = ingest(
        tmp_path / "run2", log_glob, split=TIME_SPLIT, previous=first_manifest, label_column="stars", label_threshold=3
    )
    assert (second_manifest.num_files_read, second_manifest.run_number) == (4, 2)
    assert second_manifest.num_removed_events_by_filter == {"below_threshold": 4}
    assert row_by_id(second_manifest, "users") == row_by_id(first_manifest, "users")


def test_an_id_with_too_few_events_gets_a_row_in_the_first_run_in_which_it_has_enough(tmp_path: Path) -> None:
    filter_settings = {"filter": {"min_user_events": 3}}
    first_manifest, second_manifest = ingest_in_two_runs(tmp_path, **filter_settings)
    assert set(row_by_id(first_manifest, "users")) == {"ann", "bob"}
    assert row_by_id(first_manifest, "users").items() <= row_by_id(second_manifest, "users").items()
    write_log(tmp_path / "in" / "day4.parquet", [("cat", "x", 3 * DAY_US + 5), ("dan", "y", 3 * DAY_US + 6)])
    log_glob = str(tmp_path / "in" / "*.parquet")
    third_manifest = ingest(tmp_path / "run3", log_glob, split=TIME_SPLIT, previous=second_manifest, **filter_settings)
    assert row_by_id(second_manifest, "users").items() <= row_by_id(third_manifest, "users").items()
    assert set(row_by_id(third_manifest, "users")) == {"ann", "bob", "cat", "dan"}
    assert_same_events(third_manifest, ingest(tmp_path / "whole", log_glob, split=TIME_SPLIT, **filter_settings))


def test_parts_are_copied_where_they_cannot_be_linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_cross_device_error(*_: Any) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(Path, "hardlink_to", raise_cross_device_error)
    first_manifest, second_manifest = ingest_in_two_runs(tmp_path)
    assert second_manifest.num_files_read == 1
    assert not first_manifest.path(first_manifest.parts[0].file_name).samefile(
        second_manifest.path(second_manifest.parts[0].file_name)
    )


def test_parts_of_another_engine_version_are_read_again_and_every_id_keeps_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_manifest = ingest(tmp_path / "run1", write_days(tmp_path / "in", EVENTS_BY_DAY[:3]), split=TIME_SPLIT)
    monkeypatch.setattr(DuckdbEngine, "version", "duckdb 0.0.0")
    second_manifest = ingest(
        tmp_path / "run2", write_days(tmp_path / "in", EVENTS_BY_DAY), split=TIME_SPLIT, previous=first_manifest
    )
    assert (second_manifest.num_files_read, second_manifest.rebuild_reason) == (4, None)
    for side in ("users", "items"):
        assert row_by_id(first_manifest, side).items() <= row_by_id(second_manifest, side).items()
    assert_same_events(second_manifest, ingest(tmp_path / "whole", str(tmp_path / "in" / "*.parquet"), split=TIME_SPLIT))


def test_ids_of_another_column_are_numbered_again(tmp_path: Path) -> None:
    first_manifest = ingest(tmp_path / "run1", write_days(tmp_path / "in", EVENTS_BY_DAY), split=TIME_SPLIT)
    swapped_columns = {"user_column": "item_id", "item_column": "user_id"}
    second_manifest = ingest(
        tmp_path / "run2", str(tmp_path / "in" / "*.parquet"), split=TIME_SPLIT, previous=first_manifest, **swapped_columns
    )
    assert second_manifest.rebuild_reason is not None and "('item_id', 'user_id')" in second_manifest.rebuild_reason
    assert set(row_by_id(second_manifest, "users")) == set(row_by_id(first_manifest, "items"))


def test_a_row_from_the_future_is_used_in_the_first_run_after_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_days(tmp_path / "in", EVENTS_BY_DAY)
    drop_settings = {"on_bad_rows": "drop", "max_bad_share": 0.5, "max_future_days": 0}
    monkeypatch.setattr(time, "time_ns", lambda: (3 * DAY_US - 1) * 1_000)
    first_manifest = ingest(tmp_path / "run1", path, split=TIME_SPLIT, **drop_settings)
    assert first_manifest.num_bad_rows_by_reason == {"t: in the future": 3}
    monkeypatch.setattr(time, "time_ns", lambda: 4 * DAY_US * 1_000)
    second_manifest = ingest(tmp_path / "run2", path, split=TIME_SPLIT, previous=first_manifest, **drop_settings)
    assert (second_manifest.num_bad_rows_by_reason, second_manifest.num_files_read) == ({}, 4)
    assert_same_events(second_manifest, ingest(tmp_path / "whole", path, split=TIME_SPLIT))


def test_a_bad_new_day_leaves_the_previous_run_unchanged(tmp_path: Path) -> None:
    first_manifest, _ = ingest_in_two_runs(tmp_path)
    write_parquet(tmp_path / "in" / "day4.parquet", user_id=["ann", None], item_id=["x", "x"], t=[4 * DAY_US, 4 * DAY_US])
    with raises_input_error("day4.parquet: column 'user_id', row 1: null"):
        ingest(tmp_path / "bad", str(tmp_path / "in" / "*.parquet"), split=TIME_SPLIT, previous=first_manifest)
    assert not (tmp_path / "bad").exists()
    part_name = first_manifest.parts[0].file_name
    assert first_manifest.path(part_name).stat().st_size == first_manifest.files[part_name].size_bytes


def test_a_file_without_rows_may_be_deleted(tmp_path: Path) -> None:
    log_path, empty_path = (
        write_log(tmp_path / "log.parquet", EVENTS_BY_DAY[0] + EVENTS_BY_DAY[1] + EVENTS_BY_DAY[2]),
        tmp_path / "empty.parquet",
    )
    pq.write_table(pq.read_table(log_path).slice(0, 0), empty_path)
    first_manifest = ingest(tmp_path / "run1", log_path, split=TIME_SPLIT)
    second_manifest = ingest(tmp_path / "run2", log_path, str(empty_path), split=TIME_SPLIT, previous=first_manifest)
    assert_same_events(ingest(tmp_path / "run3", log_path, split=TIME_SPLIT, previous=second_manifest), first_manifest)


def test_removing_a_filter_gives_no_row_to_ids_of_deleted_files(tmp_path: Path) -> None:
    old_path, new_path = (
        write_log(tmp_path / "old.parquet", [("rare", "r", 5)]),
        write_log(tmp_path / "new.parquet", [event for events in EVENTS_BY_DAY for event in events]),
    )
    filter_settings = {"min_item_events": 2}
    first_manifest = ingest(tmp_path / "run1", old_path, new_path, split=TIME_SPLIT, filter=filter_settings)
    second_manifest = ingest(tmp_path / "run2", new_path, split=TIME_SPLIT, previous=first_manifest)
    assert not {"rare", "r"} & {*row_by_id(second_manifest, "users"), *row_by_id(second_manifest, "items")}
    assert (second_manifest.num_idle_users, second_manifest.num_idle_items) == (0, 0)


@pytest.mark.parametrize("folder_name", ["user=bob", "item=x", "split=1", "position=5", "id=7"])
def test_a_workspace_in_a_folder_named_like_a_hive_partition_has_the_same_results(tmp_path: Path, folder_name: str) -> None:
    first_manifest, second_manifest = ingest_in_two_runs(tmp_path / folder_name)
    plain_first_manifest, plain_second_manifest = ingest_in_two_runs(tmp_path / "plain")
    for manifest, plain_manifest in ((first_manifest, plain_first_manifest), (second_manifest, plain_second_manifest)):
        assert_same_events(manifest, plain_manifest)
        for side in ("users", "items"):
            assert row_by_id(manifest, side) == row_by_id(plain_manifest, side)


events_of_day = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5), st.integers(0, DAY_US - 1)), min_size=1, max_size=8)
lists_of_days = st.lists(events_of_day, min_size=4, max_size=7)


@settings(max_examples=10)
@given(
    events_by_day=lists_of_days,
    last_day_indices=st.sets(st.integers(1, 6), min_size=1, max_size=3),
    min_item_events=st.integers(1, 2),
)
def test_the_last_of_several_runs_has_the_events_of_one_run_over_all_days(
    tmp_path_factory: pytest.TempPathFactory,
    events_by_day: list[list[Event]],
    last_day_indices: set[int],
    min_item_events: int,
) -> None:
    log_by_day = [
        [(user, item, day * DAY_US + time) for user, item, time in events] for day, events in enumerate(events_by_day)
    ]
    # With these events, the filter does not remove all events.
    log_by_day[0] += [(user, item, time) for user in (8, 9) for item in (8, 9) for time in (1, 2)]
    folder = tmp_path_factory.mktemp("runs")
    test_path = write_log(folder / "test.parquet", log_by_day[0])
    ingest_settings = {"split": {"kind": "files", "test_paths": test_path}, "filter": {"min_item_events": min_item_events}}
    manifest: InteractionsManifest | None = None
    num_days_by_run = sorted({2, *(min(day + 1, len(log_by_day)) for day in last_day_indices), len(log_by_day)})
    for run_index, num_days in enumerate(num_days_by_run):
        previous_manifest, log_glob = manifest, write_days(folder / "in", log_by_day[:num_days])
        manifest = ingest(folder / f"run{run_index}", log_glob, previous=previous_manifest, **ingest_settings)
        if previous_manifest is not None:
            for side in ("users", "items"):
                assert row_by_id(previous_manifest, side).items() <= row_by_id(manifest, side).items()
    assert manifest is not None
    manifest_of_one_run = ingest(folder / "whole", str(folder / "in" / "*.parquet"), **ingest_settings)
    assert_same_events(manifest, manifest_of_one_run)
    popularity_rank_I = np.load(manifest.path("item_rank.npy"))
    count_I = np.load(manifest.path("item_count.npy"))
    assert sorted(popularity_rank_I.tolist()) == list(range(manifest.num_items))
    assert (np.diff(count_I[np.argsort(popularity_rank_I)]) <= 0).all()


def test_the_manifest_records_which_files_have_page_checksums(tmp_path: Path) -> None:
    plain_path, path_with_checksums = tmp_path / "log" / "a.parquet", tmp_path / "log" / "b.parquet"
    for path, first_day in ((plain_path, 0), (path_with_checksums, 4)):
        times = [(first_day + day) * DAY_US for day in range(4)]
        write_parquet(path, user_id=[1, 2, 1, 2], item_id=[1, 2, 1, 2], t=times)
    pq.write_table(pq.read_table(path_with_checksums), path_with_checksums, write_page_checksum=True)
    manifest = ingest(tmp_path / "stage", str(tmp_path / "log"), split=TIME_SPLIT)
    assert {file.source.path: file.has_checksums for part in manifest.parts for file in part.files} == {
        str(plain_path): False,
        str(path_with_checksums): True,
    }


def test_rows_are_kept_if_a_filter_that_left_out_users_is_removed(tmp_path: Path) -> None:
    """A stored part has a code for each id. ann has the first code, but no row in the first run, so rows and codes differ."""
    settings: dict[str, Any] = {"split": TIME_SPLIT, "vocabulary": {"max_idle_share": 1}}
    first_manifest = ingest(
        tmp_path / "run1", write_days(tmp_path / "in", EVENTS_BY_DAY[:3]), filter={"bot_threshold": 3}, **settings
    )
    log_glob = write_days(tmp_path / "in", EVENTS_BY_DAY)
    second_manifest = ingest(tmp_path / "run2", log_glob, previous=first_manifest, **settings)
    third_manifest = ingest(tmp_path / "run3", log_glob, previous=second_manifest, **settings)
    assert (list(row_by_id(first_manifest, "users")), list(row_by_id(third_manifest, "users"))) == (
        ["bob", "cat"],
        ["bob", "cat", "ann", "dan"],
    )
    for side in ("users", "items"):
        assert row_by_id(first_manifest, side).items() <= row_by_id(second_manifest, side).items()
        assert row_by_id(second_manifest, side) == row_by_id(third_manifest, side)
    assert_same_events(third_manifest, second_manifest)
