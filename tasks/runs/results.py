"""The results of a run: the manifests of its completed stages, by type."""

from collections.abc import Iterable, Iterator
from typing import Self, cast

from recsys_core.errors import StageError
from recsys_core.manifests import (
    STAGES,
    Dataset,
    EmbeddingsManifest,
    FeaturesManifest,
    InteractionsManifest,
    Manifest,
    ManifestT,
    StageName,
    load_manifest,
)
from tasks.runs.run import Run


class Results:
    """Manifests by type. A stage adds its manifest, and later stages read it.

    >>> from recsys_core.manifests import PlanManifest, TrainManifest
    >>> plan = PlanManifest(fingerprint="f", seconds=0.1, files={}, folder="plan_sharding", world_size=2, device="cpu")
    >>> results = Results([plan])
    >>> results[PlanManifest].world_size, results.get(TrainManifest)
    (2, None)
    """

    def __init__(self, manifests: Iterable[Manifest] = ()) -> None:
        self._manifest_by_type = {type(manifest): manifest for manifest in manifests}

    @classmethod
    def read(cls, run: Run, *, until: StageName | None = None) -> Self:
        """Read the manifests in the run's folder, up to the stage `until`, without verifying checksums."""
        names = list(STAGES)
        included_names = names if until is None else names[: names.index(until) + 1]
        manifests = (load_manifest(run.folder / name, STAGES[name], verify=False) for name in included_names)
        return cls(manifest for manifest in manifests if manifest is not None)

    def add(self, manifest: Manifest) -> None:
        """Add the manifest of a completed stage."""
        self._manifest_by_type[type(manifest)] = manifest

    def get(self, manifest_type: type[ManifestT]) -> ManifestT | None:
        """Return the manifest of a stage; None if the stage is not complete or has no result."""
        return cast(ManifestT | None, self._manifest_by_type.get(manifest_type))

    def __getitem__(self, manifest_type: type[ManifestT]) -> ManifestT:
        """Return the manifest of a stage; raise StageError if the stage is not complete."""
        manifest = self.get(manifest_type)
        if manifest is None:
            raise StageError(f"the run has no completed stage {manifest_type.stage}; resume the run")
        return manifest

    def __iter__(self) -> Iterator[Manifest]:
        """Iterate over the manifests in the order of the stages."""
        return (self._manifest_by_type[stage] for stage in STAGES.values() if stage in self._manifest_by_type)

    @property
    def dataset(self) -> Dataset:
        """The ingested data; StageError if the interactions are not ingested yet."""
        return Dataset(self[InteractionsManifest], self.get(EmbeddingsManifest), self.get(FeaturesManifest))
