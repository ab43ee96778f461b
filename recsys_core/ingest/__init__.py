"""Ingest of interactions, pretrained vectors and features: from parquet to memory-mapped arrays."""

from dataclasses import dataclass
from pathlib import Path

from recsys_core.closed_form.config import LogVectorsConfig
from recsys_core.ingest.features.config import FeaturesConfig
from recsys_core.ingest.log.config import InteractionsConfig
from recsys_core.ingest.vectors.config import AnyEmbeddings, EmbeddingsConfig


@dataclass(frozen=True)
class InputConfig:
    """The settings of all inputs of a pipeline.

    Attributes:
        allowed_data_root: folder below which all files must be; None: any folder.
    """

    interactions: InteractionsConfig
    embeddings: tuple[AnyEmbeddings, ...]
    features: FeaturesConfig | None
    allowed_data_root: Path | None

    @property
    def has_vector_files(self) -> bool:
        """Whether vectors have to be read from files."""
        return any(entry.source == "parquet" for entry in self.embeddings)

    @property
    def log_vectors(self) -> LogVectorsConfig | None:
        """The entry of `embeddings` whose vectors are computed from the log; None if there is no such entry."""
        return next((entry for entry in self.embeddings if not isinstance(entry, EmbeddingsConfig)), None)
