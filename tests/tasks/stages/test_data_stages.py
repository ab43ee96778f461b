"""The ingest stages with item vectors from files and from the log."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from flows.settings.pipeline import PipelineConfig
from recsys_core.ingest.synthetic import generate
from recsys_core.manifests import LogVectorsManifest
from tasks.runs.context import Results, StageContext
from tasks.runs.run import Run
from tasks.stages.data_stages import ingest


@pytest.fixture(scope="module")
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a log and vectors of its items."""
    folder = tmp_path_factory.mktemp("data")
    generate(folder, num_users=300, num_items=80, num_events=4_000, num_cold_items=10)
    return folder


def config_with(data_folder: Path, *, embeddings: dict[str, Any]) -> PipelineConfig:
    interactions = {"paths": str(data_folder / "interactions/*.parquet"), "timestamp_column": "timestamp"}
    return PipelineConfig.model_validate({"interactions": interactions, "embeddings": embeddings})


def test_with_vectors_from_the_log_the_dataset_has_a_vector_for_each_trained_item(data_folder: Path, tmp_path: Path) -> None:
    config = config_with(data_folder, embeddings={"source": "log", "dim": 16})
    context = StageContext(Run("r", workspace=tmp_path))
    dataset = ingest(context, config.input_config)
    assert dataset.embeddings is None and dataset.log_vectors is not None
    assert dataset.vector_dim_by_table == {"item": 16}
    vector_row_I = np.load(dataset.log_vectors.vector_row_path)
    train_count_I = pq.read_table(dataset.interactions.path("items.parquet"))["train_count"].to_numpy()
    np.testing.assert_array_equal(vector_row_I >= 0, train_count_I > 0)
    assert Results.read(context.run)[LogVectorsManifest] == dataset.log_vectors
    spec = config.training_setup(dataset).model
    assert (spec.tables["item"].dim, spec.tables["item"].pretrained) == (16, True)


def test_with_vectors_from_files_the_dataset_has_no_vectors_from_the_log(data_folder: Path, tmp_path: Path) -> None:
    embeddings = {"paths": str(data_folder / "item_embeddings.parquet"), "vector_column": "embedding"}
    config = config_with(data_folder, embeddings=embeddings)
    dataset = ingest(StageContext(Run("r", workspace=tmp_path)), config.input_config)
    assert dataset.log_vectors is None and dataset.vector_dim_by_table == {"item": 64}
