"""Recommendations for parquet files of users, compared with single calls of the Retriever."""

import json
from pathlib import Path
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys_core.errors import InputError
from recsys_core.serving.retriever import Retriever
from tasks.delivery import recommendations
from tasks.delivery.recommendations import BatchSummary, version_in, write_recommendations
from tests.recsys_core.serving.conftest import ITEM_IDS, USER_IDS, ModelBuilder

K = 7


@pytest.fixture(scope="module")
def retriever(build_packaged_model: ModelBuilder) -> Retriever:
    return Retriever.load(build_packaged_model(features=("user.number",))[1].folder)


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "recs"


def write(retriever: Retriever, users: list[str], output: Path) -> BatchSummary:
    options = {"exclude_seen": True}
    return write_recommendations(retriever, users, folder=output, k=K, options=options)


def read(output: Path) -> list[dict[str, object]]:
    return [row for path in sorted(output.glob("*.parquet")) for row in pq.read_table(path).to_pylist()]


def test_each_row_of_the_files_gets_the_items_of_a_single_call(retriever: Retriever, tmp_path: Path, output: Path) -> None:
    user_ids = [USER_IDS[4], None, 1, None]
    histories = [None, ITEM_IDS[:3], ["no such item", ITEM_IDS[9]], None]
    (number_column,) = retriever.request_features.columns
    numbers = [None, 3.5, None, None]
    columns = {"name": ["a", "b", "c", "d"], "user_id": user_ids, "history": histories, number_column: numbers}
    pq.write_table(pa.table(columns), tmp_path / "users.parquet")

    summary = write(retriever, [str(tmp_path / "users.parquet")], output)

    rows = read(output)
    for row, user_id, history, number in zip(rows, user_ids, histories, numbers, strict=True):
        (expected,) = retriever.recommend([user_id], K, histories=[history], features={number_column: [number]})
        assert (row["user_id"], row["item_ids"], row["fallback"]) == (user_id, expected.item_ids, expected.fallback)
        assert row["scores"] == pytest.approx(expected.scores)
        assert row["num_unknown_items"] == expected.num_unknown_items
    assert [row["fallback"] for row in rows] == [None, "history", "history", "popularity"]
    assert summary.num_rows_by_fallback == {"model": 1, "history": 2, "features": 0, "popularity": 1}
    assert summary.columns == ["user_id", "history", number_column]
    assert json.loads((output / "_recommendations.json").read_text()) == summary._asdict()
    assert (summary.version, summary.space_id) == (retriever.version, retriever.space_id)


def test_small_batches_and_parts_give_the_same_rows(
    retriever: Retriever, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = write(retriever, [], output)
    expected_rows = read(output)
    assert [row["user_id"] for row in expected_rows] == USER_IDS
    assert summary.num_rows == len(USER_IDS)
    monkeypatch.setattr(recommendations, "MAX_BATCH_ITEMS", 5 * K)
    monkeypatch.setattr(recommendations, "PART_ROWS", 15)
    write(retriever, [], output)
    assert [pq.read_metadata(path).num_rows for path in sorted(output.glob("*.parquet"))] == [15, 15, 10]
    assert read(output) == expected_rows


def test_progress_reaches_the_number_of_rows(retriever: Retriever, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recommendations, "MAX_BATCH_ROWS", 16)
    calls: list[tuple[int, int]] = []
    write_recommendations(
        retriever,
        [],
        folder=output,
        k=1,
        options={},
        on_progress=lambda num_done, num_rows: calls.append((num_done, num_rows)),
    )
    assert calls == [(16, 40), (32, 40), (40, 40)]


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"user_id": [USER_IDS[0], 2**62 + 1], "history": [None, [1]]}, "rows 0 to 1: "),
        ({"name": ["a"]}, r"has the columns \['name'\], but none that the model reads: \['user_id', 'history'"),
        ({"user_id": [1.5]}, "rows 0 to 0: user_id 1.5"),
    ],
    ids=["item ids of another type", "no known column", "fraction"],
)
def test_an_invalid_file_leaves_the_earlier_recommendations(
    retriever: Retriever, tmp_path: Path, output: Path, columns: dict[str, list[object]], expected: str
) -> None:
    write(retriever, [], output)
    earlier_rows = read(output)
    pq.write_table(pa.table(columns), tmp_path / "users.parquet")
    with pytest.raises(InputError, match=f"users.parquet.*{expected}"):
        write(retriever, [str(tmp_path / "users.parquet")], output)
    assert read(output) == earlier_rows
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".recs")] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["recs", "users.parquet"]


def test_a_folder_with_other_files_is_not_replaced(retriever: Retriever, output: Path) -> None:
    output.mkdir()
    (output / "thesis.txt").write_text("three years of work")
    with pytest.raises(InputError, match="is not a folder of recommendations"):
        write(retriever, [], output)
    assert (output / "thesis.txt").is_file()


def test_the_next_process_restores_what_a_killed_one_has_moved(
    retriever: Retriever, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(retriever, [], output)
    expected_rows = read(output)
    output.rename(output.with_name(".recs.old"))  # killed between the two renames
    output.with_name(".recs.new").mkdir()
    (output.with_name(".recs.new") / "part-00000.parquet").write_text("half")
    monkeypatch.setattr(recommendations, "_recommend", Mock(side_effect=InputError("no")))
    with pytest.raises(InputError):
        write(retriever, [], output)
    assert read(output) == expected_rows
    assert list(output.parent.glob(".recs*")) == []


@pytest.mark.parametrize("failing_rename", [1, 2])
def test_a_failed_rename_leaves_the_earlier_recommendations(
    retriever: Retriever, output: Path, monkeypatch: pytest.MonkeyPatch, failing_rename: int
) -> None:
    write(retriever, [], output)
    rename, num_renames = Path.rename, 0

    def fail(path: Path, target: Path) -> Path:
        nonlocal num_renames
        num_renames += 1
        if num_renames == failing_rename:
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(KeyboardInterrupt):
        write(retriever, [], output)
    assert len(read(output)) == len(USER_IDS) and version_in(output) == retriever.version
    assert list(output.parent.glob(".recs*")) == []


def test_a_model_without_users_needs_files_of_users(build_packaged_model: ModelBuilder, output: Path) -> None:
    retriever = Retriever.load(build_packaged_model(users="none")[1].folder)
    with pytest.raises(InputError, match="stores no users"):
        write(retriever, [], output)
    assert not output.exists() and version_in(output) is None
