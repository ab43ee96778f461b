"""The model that a night starts from: what its run left behind."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from recsys_core.manifests import ExportManifest, FeaturesManifest, InteractionsManifest, TrainManifest, load_manifest
from recsys_core.models.spec import ModelSpec


@dataclass(frozen=True)
class Champion:
    """Stages of the run `run_id`, and the model that it trained."""

    run_id: str
    spec: ModelSpec
    train: TrainManifest
    export: ExportManifest
    interactions: InteractionsManifest
    features: FeaturesManifest | None

    @classmethod
    def open(cls, run_id: str, *, train: Path, export: Path, interactions: Path, features: Path) -> Self | None:
        """From the folders of the stages; None unless all that the model has is there, and readable by this version.

        The export is compared with its checksums. Of the others only a few files are read, and those are looked at then.
        """
        trained = load_manifest(train, TrainManifest, verify=False)
        exported = load_manifest(export, ExportManifest)
        log = load_manifest(interactions, InteractionsManifest, verify=False)
        if trained is None or exported is None or log is None or not all(log.path(name).is_file() for name in log.files):
            return None
        try:
            spec = ModelSpec.model_validate_json(exported.path("model.json").read_bytes())
        except ValueError:
            return None
        described = load_manifest(features, FeaturesManifest, verify=False) if spec.forms else None
        if spec.forms and described is None:
            return None
        return cls(run_id, spec, trained, exported, log, described)
