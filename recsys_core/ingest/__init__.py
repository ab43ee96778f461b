"""Ingest of interactions, pretrained vectors and features: from parquet to memory-mapped arrays."""

from dataclasses import dataclass
from pathlib import Path

from recsys_core.ingest.features.config import FeaturesConfig
from recsys_core.ingest.log.config import InteractionsConfig
from recsys_core.ingest.vectors.config import EmbeddingsConfig


@dataclass(frozen=True)
class InputConfig:
    """The settings of all inputs of a pipeline.

    Attributes:
        allowed_data_root: folder below which all files must be; None: any folder.
    """

    interactions: InteractionsConfig
    embeddings: tuple[EmbeddingsConfig, ...]
    features: FeaturesConfig | None
    allowed_data_root: Path | None
