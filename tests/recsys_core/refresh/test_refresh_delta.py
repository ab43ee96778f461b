"""The delta file turns the items of the parent into the items of the refreshed package."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tests.recsys_core.refresh.refreshed import TableWriter, package_folder_of, refresh_small
from tests.recsys_core.refresh.small_pipeline import SmallPipeline


def row_by_id(path: Path) -> dict[int, dict[str, object]]:
    return {row["item_id"]: row for row in pq.read_table(path).to_pylist()}


def test_upserts_and_deletes_turn_the_items_of_the_parent_into_the_new_items(
    parent: SmallPipeline, write_tables: TableWriter, tmp_path: Path
) -> None:
    write_tables(range(1004, 1310), title={1100: "new title"}, genre={1101: None, 1102: "new"})
    refresh_result = refresh_small(parent, tmp_path / "new")
    assert refresh_result is not None and refresh_result.delta_path == tmp_path / "new" / "delta.parquet"
    delta = pq.read_table(refresh_result.delta_path)
    assert delta.column_names == ["operation", "item_id", "title", "genre", "in_stock", "vector"]
    assert delta.schema.field("vector").type == pa.list_(pa.float32())
    assert delta.schema.metadata[b"space_id"].decode() == space_id_of(package_folder_of(refresh_result))
    row_after_delta_by_id = row_by_id(parent.package_folder / "items.parquet")
    ids_by_operation: dict[str, list[int]] = {"upsert": [], "delete": []}
    for row in delta.to_pylist():
        operation = row.pop("operation")
        ids_by_operation[operation].append(row["item_id"])
        if operation == "delete":
            assert {column for column, column_value in row.items() if column_value is not None} == {"item_id"}
            del row_after_delta_by_id[row["item_id"]]
        else:
            row_after_delta_by_id[row["item_id"]] = row
    assert row_after_delta_by_id == row_by_id(package_folder_of(refresh_result) / "items.parquet")
    assert {*ids_by_operation["upsert"]} == {1100, 1101, 1102, *range(1300, 1310)}
    assert {*ids_by_operation["delete"]} == {*range(1000, 1004)}


def test_a_delta_may_have_only_deletes(parent: SmallPipeline, write_tables: TableWriter, tmp_path: Path) -> None:
    write_tables(range(1004, 1300))
    refresh_result = refresh_small(parent, tmp_path / "new")
    assert refresh_result is not None
    delta = pq.read_table(refresh_result.delta_path)
    assert delta["operation"].to_pylist() == ["delete"] * 4 and delta["vector"].null_count == 4


def space_id_of(package_folder: Path) -> str:
    metadata: dict[bytes, bytes] = pq.read_schema(package_folder / "items.parquet").metadata
    return metadata[b"space_id"].decode()
