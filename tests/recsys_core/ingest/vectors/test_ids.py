"""Ids of vectors with any Unicode text are stored unchanged and match the items of the log."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys_core.ingest.vectors.config import EmbeddingsConfig
from recsys_core.ingest.vectors.ingest import ingest_embeddings
from tests.recsys_core.ingest import interaction_logs
from tests.recsys_core.ingest.log.test_checks import ODD, STRANGE
from tests.recsys_core.ingest.parquet_files import assert_rejects, write_parquet


@pytest.mark.parametrize("dictionary", [True, False])
def test_unusual_unicode_ids_are_stored_unchanged(tmp_path: Path, dictionary: bool) -> None:
    ids = pa.array(STRANGE).dictionary_encode() if dictionary else pa.array(STRANGE)
    path = write_parquet(tmp_path / "v.parquet", item_id=ids, v=[[1.0 + row] for row in range(len(STRANGE))])
    manifest = ingest_embeddings((EmbeddingsConfig(paths=path, vector_column="v"),), folder=tmp_path / "embeddings")
    assert pq.read_table(manifest.ids_path("item"))["id"].to_pylist() == STRANGE
    log = [(user, item, time) for time, (user, item) in enumerate((user, item) for user in "ab" for item in STRANGE[::-1])]
    store = interaction_logs.ingest(
        tmp_path / "stage",
        interaction_logs.write_log(tmp_path / "a.parquet", log),
        split={"kind": "leave_last_out"},
        embeddings=manifest,
    )
    items, rows = interaction_logs.read_store(store).items, np.load(store.path("vector_row.npy"))
    assert [STRANGE[row] for row in rows] == items
    assert store.num_items_with_vector == len(STRANGE)


@pytest.mark.parametrize("name", ODD)
def test_no_unusual_id_breaks_a_message(tmp_path: Path, name: str) -> None:
    path = write_parquet(tmp_path / "v.parquet", item_id=[name] * 2, v=[[1.0], [2.0]])
    config = EmbeddingsConfig(paths=path, vector_column="v")

    def stage(folder: Path) -> object:
        return ingest_embeddings((config,), folder=folder)

    assert_rejects(stage, tmp_path, "v.parquet: column 'item_id', row 1: id '", "(1 of 2 rows); fix these rows")
    with pytest.raises(ValueError) as caught:
        stage(tmp_path / "stage")
    assert str(caught.value).isprintable() and len(str(caught.value)) < 400 + len(path)
