from collections.abc import Iterator
from typing import Any

import pytest

from tests.recsys_core.refresh.refreshed import Tables
from tests.recsys_core.refresh.small_pipeline import ITEMS, SmallPipeline, build_pipeline, write_items, write_vectors


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> SmallPipeline:
    return build_pipeline(tmp_path_factory.mktemp("parent") / "files")


@pytest.fixture
def tables(parent: SmallPipeline) -> Iterator[Tables]:
    """A function that writes the tables with these items; after the test they are as in the training."""

    def write(vectors: Any = ITEMS, items: Any = None, **changed: dict[int, Any]) -> None:
        ids = list(vectors)
        write_vectors(parent.files, ids)
        write_items(parent.files, ids if items is None else items, **changed)

    yield write
    write()
