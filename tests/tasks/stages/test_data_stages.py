"""The ingest stages with item vectors from files and from the log."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from flows.settings.pipeline import PipelineConfig
from recsys_core.ingest.synthetic import generate
from recsys_core.manifests import LogVectorsManifest
from tasks.runs.context import Results, StageContext
from tasks.runs.run import Run
from tasks.stages.data_stages import ingest


def test_with_vectors_from_the_log_the_dataset_has_a_vector_for_each_trained_item(tmp_path: Path) -> None:
    generate(tmp_path / "data", num_users=300, num_items=80, num_events=4_000, num_cold_items=10)
    settings = {
        "interactions": {"paths": str(tmp_path / "data/interactions/*.parquet"), "timestamp_column": "timestamp"},
        "embeddings": {"source": "log", "dim": 16},
    }
    config = PipelineConfig.model_validate(settings)
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


def test_with_vectors_from_files_the_dataset_has_no_vectors_from_the_log(tmp_path: Path) -> None:
    generate(tmp_path / "data", num_users=300, num_items=80, num_events=4_000, num_cold_items=10)
    settings = {
        "interactions": {"paths": str(tmp_path / "data/interactions/*.parquet"), "timestamp_column": "timestamp"},
        "embeddings": {"paths": str(tmp_path / "data/item_embeddings.parquet"), "vector_column": "embedding"},
    }
    dataset = ingest(StageContext(Run("r", workspace=tmp_path)), PipelineConfig.model_validate(settings).input_config)
    assert dataset.log_vectors is None and dataset.vector_dim_by_table == {"item": 64}
