"""Recommendations for the users in parquet files, compared with single calls of the Retriever."""

import json
from pathlib import Path
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys_core.errors import InputError
from recsys_core.serving.retriever import Retriever
from tasks.delivery import recommendations
from tasks.delivery.recommendations import BatchSummary, is_written, write_recommendations
from tests.recsys_core.serving.conftest import ITEM_IDS, USER_IDS, ModelBuilder

K = 7
SETTINGS = {"k": K, "user_paths": []}


@pytest.fixture(scope="module")
def retriever(build_packaged_model: ModelBuilder) -> Retriever:
    return Retriever.load(build_packaged_model(features=("user.number",)).package.folder)


@pytest.fixture
def output_folder(tmp_path: Path) -> Path:
    return tmp_path / "recs"


def write_top_k(retriever: Retriever, user_files: list[str], output_folder: Path) -> BatchSummary:
    """Write K items per user of `user_files`, or per user of the package if the list is empty."""
    return write_recommendations(
        retriever, user_files, folder=output_folder, k=K, options={"exclude_seen": True}, settings=SETTINGS
    )


def read_rows(output_folder: Path) -> list[dict[str, object]]:
    return [row for path in sorted(output_folder.glob("*.parquet")) for row in pq.read_table(path).to_pylist()]


def test_each_row_of_a_file_gets_the_items_of_a_single_call(retriever: Retriever, tmp_path: Path, output_folder: Path) -> None:
    user_ids = [USER_IDS[4], None, 1, None]
    histories = [None, ITEM_IDS[:3], ["no such item", ITEM_IDS[9]], None]
    (number_column,) = retriever.request_features.columns
    numbers = [None, 3.5, None, None]
    columns = {"name": ["a", "b", "c", "d"], "user_id": user_ids, "history": histories, number_column: numbers}
    pq.write_table(pa.table(columns), tmp_path / "users.parquet")

    summary = write_top_k(retriever, [str(tmp_path / "users.parquet")], output_folder)

    rows = read_rows(output_folder)
    for row, user_id, history, number in zip(rows, user_ids, histories, numbers, strict=True):
        (expected,) = retriever.recommend([user_id], K, histories=[history], features={number_column: [number]})
        assert (row["user_id"], row["item_ids"], row["fallback"]) == (user_id, expected.item_ids, expected.fallback)
        assert row["scores"] == pytest.approx(expected.scores)
        assert row["num_unknown_items"] == expected.num_unknown_items
    assert [row["fallback"] for row in rows] == [None, "history", "history", "popularity"]
    assert summary.num_rows_by_fallback == {"model": 1, "history": 2, "features": 0, "popularity": 1}
    assert summary.columns == ["user_id", "history", number_column]
    assert json.loads((output_folder / "_recommendations.json").read_text()) == summary._asdict()
    assert (summary.version, summary.space_id) == (retriever.version, retriever.space_id)


def test_small_batches_and_small_files_give_the_same_rows(
    retriever: Retriever, output_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = write_top_k(retriever, [], output_folder)
    expected_rows = read_rows(output_folder)
    assert [row["user_id"] for row in expected_rows] == USER_IDS
    assert summary.num_rows == len(USER_IDS)
    monkeypatch.setattr(recommendations, "MAX_BATCH_ITEMS", 5 * K)
    monkeypatch.setattr(recommendations, "PART_ROWS", 15)
    write_top_k(retriever, [], output_folder)
    assert [pq.read_metadata(path).num_rows for path in sorted(output_folder.glob("*.parquet"))] == [15, 15, 10]
    rows = read_rows(output_folder)
    # The scores differ in their last bits, because a matrix product depends on the number of its rows.
    for row, expected_row in zip(rows, expected_rows, strict=True):
        assert row | {"scores": None} == expected_row | {"scores": None}
        assert row["scores"] == pytest.approx(expected_row["scores"], rel=1e-5)


def test_progress_reaches_the_number_of_rows(
    retriever: Retriever, output_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recommendations, "MAX_BATCH_ROWS", 16)
    progress_calls: list[tuple[int, int]] = []
    write_recommendations(
        retriever,
        [],
        folder=output_folder,
        k=1,
        options={},
        settings={},
        on_progress=lambda num_done, num_rows: progress_calls.append((num_done, num_rows)),
    )
    assert progress_calls == [(16, 40), (32, 40), (40, 40)]


@pytest.mark.parametrize(
    ("narrow_ids", "wide_ids", "output_type"),
    [
        (pa.array([USER_IDS[4]], pa.int32()), pa.array([2**40]), pa.int64()),
        (pa.array([None], pa.int8()), pa.array([USER_IDS[4]], pa.uint64()), pa.int64()),
        (pa.array([None], pa.float32()), pa.array([2.0**24 + 1]), pa.float64()),
    ],
    ids=["int32 and int64", "int8 and uint64", "float32 and float64"],
)
def test_user_ids_stay_unchanged_if_the_files_have_number_types_of_different_widths(
    retriever: Retriever,
    tmp_path: Path,
    output_folder: Path,
    narrow_ids: pa.Array,
    wide_ids: pa.Array,
    output_type: pa.DataType,
) -> None:
    user_paths = [tmp_path / "users-0.parquet", tmp_path / "users-1.parquet"]
    for path, user_ids in zip(user_paths, (narrow_ids, wide_ids), strict=True):
        pq.write_table(pa.table({"user_id": user_ids}), path)
    write_top_k(retriever, [str(path) for path in user_paths], output_folder)
    (part_path,) = output_folder.glob("*.parquet")
    assert pq.read_schema(part_path).field("user_id").type == output_type
    assert [row["user_id"] for row in read_rows(output_folder)] == [*narrow_ids.to_pylist(), *wide_ids.to_pylist()]


@pytest.mark.parametrize("index_of_file_with_history", [0, 1])
def test_a_column_that_only_some_files_have_is_an_error(
    retriever: Retriever, tmp_path: Path, output_folder: Path, index_of_file_with_history: int
) -> None:
    user_paths = [tmp_path / "users-0.parquet", tmp_path / "users-1.parquet"]
    for index, path in enumerate(user_paths):
        history_column = {"history": [ITEM_IDS[:3]]} if index == index_of_file_with_history else {}
        pq.write_table(pa.table({"user_id": [USER_IDS[index]]} | history_column), path)
    with pytest.raises(InputError, match=rf"users-{1 - index_of_file_with_history}\.parquet: .*'history'"):
        write_top_k(retriever, [str(path) for path in user_paths], output_folder)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"user_id": [USER_IDS[0], 2**62 + 1], "history": [None, [1]]}, "rows 0 to 1: "),
        ({"name": ["a"]}, r"has the columns \['name'\], but none that the model reads: \['user_id', 'history'"),
        ({"user_id": [1.5]}, "rows 0 to 0: user_id 1.5"),
        ({"history": [None, "item-001"]}, "rows 0 to 1: history 'item-001' is of type str; pass a list of item ids"),
        ({"history": [7]}, "rows 0 to 0: history 7 is of type int; pass a list of item ids"),
    ],
    ids=["item ids of another type", "no known column", "fraction", "text as history", "item as history"],
)
def test_an_invalid_file_keeps_the_earlier_recommendations(
    retriever: Retriever, tmp_path: Path, output_folder: Path, columns: dict[str, list[object]], message: str
) -> None:
    write_top_k(retriever, [], output_folder)
    earlier_rows = read_rows(output_folder)
    pq.write_table(pa.table(columns), tmp_path / "users.parquet")
    with pytest.raises(InputError, match=f"users.parquet.*{message}"):
        write_top_k(retriever, [str(tmp_path / "users.parquet")], output_folder)
    assert read_rows(output_folder) == earlier_rows
    assert sorted(path.name for path in tmp_path.iterdir()) == ["recs", "users.parquet"]


def test_a_folder_with_other_files_is_not_replaced(retriever: Retriever, output_folder: Path) -> None:
    output_folder.mkdir()
    (output_folder / "thesis.txt").write_text("three years of work")
    with pytest.raises(InputError, match="is not a folder of recommendations"):
        write_top_k(retriever, [], output_folder)
    assert (output_folder / "thesis.txt").is_file()


def test_recommendations_next_to_other_files_are_not_replaced(retriever: Retriever, output_folder: Path) -> None:
    write_top_k(retriever, [], output_folder)
    (output_folder / "notes.txt").write_text("three years of work")
    with pytest.raises(InputError, match=r"recs: has other files than recommendations, such as 'notes\.txt'"):
        write_top_k(retriever, [], output_folder)
    assert (output_folder / "notes.txt").is_file()


def test_the_recommendations_that_a_killed_process_has_moved_are_restored(
    retriever: Retriever, output_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_top_k(retriever, [], output_folder)
    expected_rows = read_rows(output_folder)
    output_folder.rename(output_folder.with_name(".recs.old"))  # the process was killed between its two renames
    output_folder.with_name(".recs.new").mkdir()
    (output_folder.with_name(".recs.new") / "part-00000.parquet").write_text("half")
    monkeypatch.setattr(recommendations, "_recommend", Mock(side_effect=InputError("no")))
    with pytest.raises(InputError):
        write_top_k(retriever, [], output_folder)
    assert read_rows(output_folder) == expected_rows
    assert list(output_folder.parent.glob(".recs*")) == []


@pytest.mark.parametrize("failing_rename", [1, 2], ids=["old folder", "new folder"])
def test_an_interrupted_rename_keeps_the_earlier_recommendations(
    retriever: Retriever, output_folder: Path, monkeypatch: pytest.MonkeyPatch, failing_rename: int
) -> None:
    write_top_k(retriever, [], output_folder)
    rename, num_renames = Path.rename, 0

    def fail_once(path: Path, target: Path) -> Path:
        nonlocal num_renames
        num_renames += 1
        if num_renames == failing_rename:
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail_once)
    with pytest.raises(KeyboardInterrupt):
        write_top_k(retriever, [], output_folder)
    assert len(read_rows(output_folder)) == len(USER_IDS)
    assert is_written(output_folder, version=retriever.version, settings=SETTINGS)
    assert list(output_folder.parent.glob(".recs*")) == []


def test_a_model_without_users_needs_files_of_users(build_packaged_model: ModelBuilder, output_folder: Path) -> None:
    retriever = Retriever.load(build_packaged_model(users="none").package.folder)
    with pytest.raises(InputError, match="stores no users"):
        write_top_k(retriever, [], output_folder)
    assert not output_folder.exists()


def test_recommendations_of_another_version_or_with_a_missing_file_are_not_current(
    retriever: Retriever, output_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_written_now(**changes: object) -> bool:
        return is_written(output_folder, **{"version": retriever.version, "settings": SETTINGS} | changes)  # type: ignore[arg-type]

    monkeypatch.setattr(recommendations, "MAX_BATCH_ROWS", 16)
    monkeypatch.setattr(recommendations, "PART_ROWS", 16)
    assert not is_written_now()
    write_top_k(retriever, [], output_folder)
    assert is_written_now()
    assert not is_written_now(version="8")
    assert not is_written_now(settings=SETTINGS | {"k": 8})
    (output_folder / "part-00001.parquet").unlink()
    assert not is_written_now()
    write_top_k(retriever, [], output_folder)
    assert is_written_now()
    summary_path = output_folder / "_recommendations.json"
    summary = json.loads(summary_path.read_text())
    del summary["settings"]  # earlier versions of nightjar wrote no settings
    summary_path.write_text(json.dumps(summary))
    assert not is_written_now()
