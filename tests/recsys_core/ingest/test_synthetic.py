"""The generated dataset: its log, its item vectors, and items without events before the last days."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from recsys_core.ingest.log.config import InteractionsConfig
from recsys_core.ingest.log.ingest import ingest_interactions
from recsys_core.ingest.synthetic import FIRST_DAY, generate
from recsys_core.ingest.vectors.config import EmbeddingsConfig
from recsys_core.ingest.vectors.ingest import ingest_embeddings

SIZES = {"num_users": 200, "num_items": 400, "num_events": 6000, "num_days": 10, "dim": 8, "num_cold_items": 40}


@pytest.fixture(scope="module")
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a generated dataset."""
    folder = tmp_path_factory.mktemp("synthetic")
    generate(folder, **SIZES)
    return folder


def test_both_ingests_accept_the_generated_files(data_folder: Path, tmp_path: Path) -> None:
    vectors_config = EmbeddingsConfig(paths=str(data_folder / "item_embeddings.parquet"), vector_column="embedding")
    embeddings = ingest_embeddings((vectors_config,), folder=tmp_path / "embeddings")
    log_config = InteractionsConfig(
        paths=str(data_folder / "interactions" / "*.parquet"), timestamp_column="timestamp", threads=1
    )
    interactions = ingest_interactions(log_config, embeddings=embeddings, folder=tmp_path / "interactions")
    item_vectors = embeddings.tables["item"]
    assert (item_vectors.num_rows, item_vectors.dim) == (400, 8)
    assert (interactions.num_items, interactions.num_items_with_vector) == (400, 400)
    assert interactions.num_events == 6000
    assert min(interactions.num_validation_events, interactions.num_test_events) > 300  # a day has 600 events on average
    assert (interactions.user_id_type, interactions.item_id_type, interactions.num_users <= 200) == ("string", "int64", True)


def test_cold_items_have_vectors_and_no_event_before_the_last_two_days(data_folder: Path) -> None:
    log = pq.read_table(data_folder / "interactions")
    event_days = (log.column("timestamp").to_numpy() - FIRST_DAY) // np.timedelta64(1, "D")
    is_cold = log.column("item_id").to_numpy() >= 1000 + 400 - 40  # the last 40 of the 400 items, whose ids begin at 1000
    assert set(event_days[is_cold].tolist()) == {8, 9}
    vector_ids = pq.read_table(data_folder / "item_embeddings.parquet").column("item_id").to_pylist()
    assert sorted(vector_ids) == list(range(1000, 1400))


def test_each_day_of_the_log_has_its_own_file(data_folder: Path) -> None:
    paths = sorted((data_folder / "interactions").iterdir())
    assert [path.name for path in paths] == [f"day-{day:02d}.parquet" for day in range(10)]
    for day, path in enumerate(paths):
        event_days = (pq.read_table(path).column("timestamp").to_numpy() - FIRST_DAY) // np.timedelta64(1, "D")
        assert set(event_days.tolist()) == {day}


def test_the_data_depend_on_the_seed_only(data_folder: Path, tmp_path: Path) -> None:
    generate(tmp_path / "same_seed", **SIZES)
    generate(tmp_path / "other_seed", **SIZES, seed=8)
    for name in ("interactions", "item_embeddings.parquet"):
        assert pq.read_table(data_folder / name).equals(pq.read_table(tmp_path / "same_seed" / name))
        assert not pq.read_table(data_folder / name).equals(pq.read_table(tmp_path / "other_seed" / name))
