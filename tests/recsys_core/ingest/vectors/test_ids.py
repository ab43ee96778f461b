"""Vectors whose ids are unusual Unicode texts."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys_core.ingest.vectors.config import EmbeddingsConfig
from recsys_core.ingest.vectors.ingest import ingest_embeddings
from tests.recsys_core.ingest import interaction_logs
from tests.recsys_core.ingest.log.test_checks import TEXT_IDS, UNUSUAL_IDS
from tests.recsys_core.ingest.parquet_files import assert_rejects, write_parquet


@pytest.mark.parametrize("is_dictionary", [True, False])
def test_all_texts_are_stored_unchanged_as_ids_and_match_the_items_of_the_log(tmp_path: Path, is_dictionary: bool) -> None:
    ids = pa.array(TEXT_IDS).dictionary_encode() if is_dictionary else pa.array(TEXT_IDS)
    path = write_parquet(tmp_path / "v.parquet", item_id=ids, v=[[1.0 + row] for row in range(len(TEXT_IDS))])
    embeddings = ingest_embeddings((EmbeddingsConfig(paths=path, vector_column="v"),), folder=tmp_path / "embeddings")
    assert pq.read_table(embeddings.ids_path("item"))["id"].to_pylist() == TEXT_IDS
    items = TEXT_IDS[::-1]
    log = [(user, item, time) for user in "ab" for time, item in enumerate(items)]
    interactions = interaction_logs.ingest(
        tmp_path / "stage",
        interaction_logs.write_log(tmp_path / "a.parquet", log),
        split={"kind": "leave_last_out"},
        embeddings=embeddings,
    )
    items_by_row, vector_rows = interaction_logs.read_store(interactions).items, np.load(interactions.path("vector_row.npy"))
    assert [TEXT_IDS[row] for row in vector_rows] == items_by_row
    assert interactions.num_items_with_vector == len(TEXT_IDS)


@pytest.mark.parametrize("item_id", UNUSUAL_IDS)
def test_a_message_about_an_unusual_id_is_printable_and_short(tmp_path: Path, item_id: str) -> None:
    path = write_parquet(tmp_path / "v.parquet", item_id=[item_id] * 2, v=[[1.0], [2.0]])
    config = EmbeddingsConfig(paths=path, vector_column="v")

    def ingest(folder: Path) -> object:
        return ingest_embeddings((config,), folder=folder)

    assert_rejects(ingest, tmp_path, "v.parquet: column 'item_id', row 1: id '", "(1 of 2 rows); fix these rows")
    with pytest.raises(ValueError) as error_info:
        ingest(tmp_path / "stage")
    assert str(error_info.value).isprintable() and len(str(error_info.value)) < 400 + len(path)
