"""The synthetic catalogue passes both ingests and has items without events before the last days."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from recsys_core.ingest.log.config import InteractionsConfig
from recsys_core.ingest.log.ingest import ingest_interactions
from recsys_core.ingest.synthetic import FIRST_DAY, generate
from recsys_core.ingest.vectors.config import EmbeddingsConfig
from recsys_core.ingest.vectors.ingest import ingest_embeddings

SIZE = {"num_users": 200, "num_items": 400, "num_events": 6000, "num_days": 10, "dim": 8, "num_cold_items": 40}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder_with_data = tmp_path_factory.mktemp("synthetic")
    generate(folder_with_data, **SIZE)
    return folder_with_data


def test_both_ingests_accept_the_generated_files(folder: Path, tmp_path: Path) -> None:
    vectors = EmbeddingsConfig(paths=str(folder / "item_embeddings.parquet"), vector_column="embedding")
    embeddings = ingest_embeddings((vectors,), folder=tmp_path / "embeddings")
    log = InteractionsConfig(paths=str(folder / "interactions" / "*.parquet"), timestamp_column="timestamp", threads=1)
    interactions = ingest_interactions(log, embeddings=embeddings, folder=tmp_path / "interactions")
    table = embeddings.tables["item"]
    assert (table.num_rows, table.dim, interactions.num_items, interactions.num_items_with_vector) == (400, 8, 400, 400)
    assert interactions.num_train_events + interactions.num_validation_events + interactions.num_test_events == 6000
    assert min(interactions.num_validation_events, interactions.num_test_events) > 300
    assert (interactions.user_id_type, interactions.item_id_type, interactions.num_users <= 200) == ("string", "int64", True)


def test_cold_items_have_vectors_and_no_event_before_the_last_two_days(folder: Path) -> None:
    log = pq.read_table(folder / "interactions")
    day = (log.column("timestamp").to_numpy() - FIRST_DAY) // np.timedelta64(1, "D")
    cold = log.column("item_id").to_numpy() >= 1000 + 400 - 40
    assert set(day[cold].tolist()) == {8, 9}
    vector_ids = pq.read_table(folder / "item_embeddings.parquet").column("item_id").to_pylist()
    assert sorted(vector_ids) == list(range(1000, 1400))


def test_every_day_has_a_file_of_its_own(folder: Path) -> None:
    paths = sorted((folder / "interactions").iterdir())
    assert [path.name for path in paths] == [f"day-{day:02d}.parquet" for day in range(10)]
    for number, path in enumerate(paths):
        day = (pq.read_table(path).column("timestamp").to_numpy() - FIRST_DAY) // np.timedelta64(1, "D")
        assert set(day.tolist()) == {number}


def test_the_catalogue_is_a_function_of_the_seed(folder: Path, tmp_path: Path) -> None:
    generate(tmp_path / "same", **SIZE)
    generate(tmp_path / "other", **SIZE, seed=8)
    for name in ("interactions", "item_embeddings.parquet"):
        assert pq.read_table(folder / name).equals(pq.read_table(tmp_path / "same" / name))
        assert not pq.read_table(folder / name).equals(pq.read_table(tmp_path / "other" / name))
