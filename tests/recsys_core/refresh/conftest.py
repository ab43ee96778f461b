"""Fixtures: a small pipeline whose package is refreshed, and a function that changes its tables."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.recsys_core.refresh.refreshed import TableWriter
from tests.recsys_core.refresh.small_pipeline import ITEMS, SmallPipeline, build_pipeline, write_items, write_vectors


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> SmallPipeline:
    """The pipeline whose package is the parent of the refreshed packages."""
    return build_pipeline(tmp_path_factory.mktemp("parent") / "files")


@pytest.fixture
def write_tables(parent: SmallPipeline) -> Iterator[TableWriter]:
    """A function that writes the vectors and the table of items. After the test, the original tables are written."""

    def write(vector_ids: Any = ITEMS, item_ids: Any = None, **changed_columns: dict[int, Any]) -> None:
        """Write vectors of `vector_ids` and a table of `item_ids`, by default of the same items.

        changed_columns: changed values of a column by item id.
        """
        ids = list(vector_ids)
        write_vectors(parent.input_folder, ids)
        write_items(parent.input_folder, ids if item_ids is None else item_ids, **changed_columns)

    yield write
    write()
