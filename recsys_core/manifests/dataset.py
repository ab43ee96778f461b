"""The ingested data of one run as one object."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from recsys_core.manifests.data_stages import EmbeddingsManifest, FeaturesManifest, InteractionsManifest
from recsys_core.manifests.stage_folder import require_manifest


@dataclass(frozen=True)
class Dataset:
    """The manifests of the ingest stages of one run.

    Attributes:
        interactions: vocabularies and the event store.
        embeddings: pretrained vectors by table; None without pretrained vectors.
        features: features of users, items and events; None without features.
    """

    interactions: InteractionsManifest
    embeddings: EmbeddingsManifest | None = None
    features: FeaturesManifest | None = None

    @classmethod
    def open(cls, *, interactions: Path, embeddings: Path | None = None, features: Path | None = None) -> Self:
        """Open the stage folders without verifying checksums. Raise StageError if a stage is missing or incomplete."""
        return cls(
            require_manifest(interactions, InteractionsManifest, verify=False),
            None if embeddings is None else require_manifest(embeddings, EmbeddingsManifest, verify=False),
            None if features is None else require_manifest(features, FeaturesManifest, verify=False),
        )

    @property
    def item_embeddings(self) -> EmbeddingsManifest | None:
        """The embeddings if they hold vectors of items; otherwise None."""
        return self.embeddings if self.embeddings is not None and "item" in self.embeddings.tables else None
