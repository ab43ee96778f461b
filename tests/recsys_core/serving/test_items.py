"""Items of a package: their vectors, which are in items.parquet or only in the index, and their joined columns."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys_core.errors import StageError
from recsys_core.serving.items import ROW_GROUP_ROWS, ItemTable, join_columns, write_items
from recsys_core.serving.retriever import Retriever
from tests.recsys_core.serving.conftest import DIM, ITEM_FILES, ITEM_IDS, NUM_ITEMS, ModelBuilder


@pytest.mark.parametrize("index_kind", ["flat", "hnsw", "ivf_flat", "ivf_sq8"])
@pytest.mark.parametrize("item_vectors", ["fp32", "fp16", "none"])
def test_item_vectors_have_the_precision_of_items_parquet_or_of_the_index(
    build_packaged_model: ModelBuilder, index_kind: str, item_vectors: str
) -> None:
    exported_model, package = build_packaged_model(index_kind=index_kind, item_files=ITEM_FILES, item_vectors=item_vectors)
    retriever = Retriever.load(package.folder)
    assert ("vector" in pq.read_schema(package.folder / "package" / "items.parquet").names) == (item_vectors != "none")
    is_read_from_sq8 = index_kind == "ivf_sq8" and item_vectors == "none"
    tolerance = 0.02 if is_read_from_sq8 else 1e-3 if item_vectors == "fp16" else 1e-6
    item_row_I = np.random.default_rng(0).permutation(NUM_ITEMS)
    np.testing.assert_allclose(retriever.item_vectors(item_row_I), exported_model.item_vectors[item_row_I], atol=tolerance)
    assert retriever.item_vectors(item_row_I[:0]).shape == (0, DIM)
    batches = list(retriever.item_batches(128))
    assert [len(batch) for batch in batches] == [128, 128, 44] and batches[0].column_names[-1] == "vector"
    vectors_of_batches = np.concatenate([batch["vector"].combine_chunks().flatten().to_numpy() for batch in batches])
    np.testing.assert_array_equal(vectors_of_batches.reshape(NUM_ITEMS, DIM), retriever.item_vectors(np.arange(NUM_ITEMS)))
    assert [item_id for batch in batches for item_id in batch["item_id"].to_pylist()] == ITEM_IDS
    (answer,) = retriever.similar([ITEM_IDS[7]], k=3, with_vectors=True)
    np.testing.assert_allclose(answer.query_vector, exported_model.item_vectors[7], atol=tolerance)


def test_a_package_needs_item_vectors_if_its_index_has_none(build_packaged_model: ModelBuilder) -> None:
    with pytest.raises(StageError, match=r"items.parquet: the file has no vectors, and they cannot be read from an index ivf"):
        build_packaged_model(index_kind="ivf_pq", item_vectors="none")


def test_item_vectors_that_overflow_half_precision_are_rejected(tmp_path: Path) -> None:
    columns, vector_ID = pa.table({"item_id": [1, 2]}), np.array([[1, 2], [70_000, 3]], np.float32)
    with pytest.raises(StageError, match=r"values of 1 to 70000, which do not fit .*; set package.item_vectors to fp32"):
        write_items(tmp_path / "items.parquet", columns=columns, item_vector_ID=vector_ID, space_id="", precision="fp16")


def test_vectors_of_several_row_groups_are_returned_in_the_requested_order(tmp_path: Path) -> None:
    num_items = 2 * ROW_GROUP_ROWS + 10
    vector_ID = np.arange(4 * num_items, dtype=np.float32).reshape(num_items, 4)
    columns = pa.table({"item_id": pa.array(range(num_items))})
    write_items(tmp_path / "items.parquet", columns=columns, item_vector_ID=vector_ID, space_id="s")
    item_table = ItemTable(tmp_path / "items.parquet", filter_columns=(), has_titles=False)
    row_B = np.array([num_items - 1, 0, ROW_GROUP_ROWS, ROW_GROUP_ROWS - 1, 0])
    np.testing.assert_array_equal(item_table.vectors(row_B), vector_ID[row_B])


def test_columns_of_a_file_are_joined_by_item_row(tmp_path: Path) -> None:
    pq.write_table(pa.table({"row": [2, 0], "price": [5.0, 7.0], "title": ["c", None]}), tmp_path / "columns.parquet")
    joined_table = join_columns(pa.table({"item_id": ["x", "y", "z"]}), [tmp_path / "columns.parquet"])
    assert joined_table.to_pydict() == {"item_id": ["x", "y", "z"], "price": [7.0, None, 5.0], "title": [None, None, "c"]}
