"""`nightjar demo`: generated data and its config."""

from pathlib import Path

from flows.settings.pipeline import PipelineConfig
from flows.settings.template import to_commented_yaml
from recsys_core.ingest.log.config import InteractionsConfig, TimeSplit
from recsys_core.ingest.synthetic import generate
from recsys_core.ingest.vectors.config import EmbeddingsConfig
from recsys_core.models.config import TwoTowerConfig
from recsys_core.training.config import TrainingConfig


def write_demo(workspace: Path) -> Path:
    """Generate `<workspace>/data` and write `<workspace>/nightly.yaml`, unless they exist; return the path of the config."""
    config_path = workspace / "nightly.yaml"
    if not (workspace / "data" / "item_embeddings.parquet").is_file():
        generate(workspace / "data")
    if not config_path.is_file():
        config_path.write_text(to_commented_yaml(demo_config()), encoding="utf-8")
    return config_path


def demo_config() -> PipelineConfig:
    """Return a config for the generated log: the last two days are the test split, the day before is the validation split."""
    return PipelineConfig(
        name="demo",
        workspace=Path(),
        interactions=InteractionsConfig(
            paths=("data/interactions/*.parquet",),
            timestamp_column="timestamp",
            split=TimeSplit(test_days=2, validation_days=1),
        ),
        embeddings=(EmbeddingsConfig(paths=("data/item_embeddings.parquet",), vector_column="embedding"),),
        model=TwoTowerConfig(),
        training=TrainingConfig(epochs=4, batch_size=512),
    )
