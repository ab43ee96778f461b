"""The context of a stage: the run, its options, and the results of earlier stages."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self, cast, get_args

from recsys_core.errors import InputError, StageError, shown
from recsys_core.manifests import (
    STAGES,
    Dataset,
    EmbeddingsManifest,
    FeaturesManifest,
    InteractionsManifest,
    LogVectorsManifest,
    Manifest,
    ManifestT,
    StageName,
    load_manifest,
    read_unchecked_manifest,
    without_outdated,
)
from tasks.runs.run import RUNS_FOLDER_NAME, Run
from tasks.runs.workspace import Workspace

Promote = Literal["by_gate", "never", "force"]
"""by_gate: the comparison with the champion decides. never: the champion stays. force: the new version becomes champion."""
MAX_REASON_CHARACTERS = 200


def check_reason(reason: str) -> None:
    """Raise InputError unless `reason` is one printable line of at most MAX_REASON_CHARACTERS characters."""
    if len(reason) > MAX_REASON_CHARACTERS:
        problem = f"has {len(reason)} characters; shorten the reason"
    elif not reason.isprintable():
        problem = "has a control character, such as a line break; remove the character"
    else:
        return
    raise InputError(
        f"reason {shown(reason)}: a reason is one line of at most {MAX_REASON_CHARACTERS} characters, but this reason {problem}"
    )


@dataclass(frozen=True)
class RunOptions:
    """Options of one run, which are not part of the config.

    Attributes:
        reason: why the run was started; empty for a scheduled run. It becomes a tag of the run in Prefect and MLflow.
        full_retrain: build the vocabularies again, read all input files and train from scratch.
        dry_run: execute all stages, but register no version.
        promote: rule that decides whether the new version becomes champion. `force` needs a reason, and the version must still
            pass the smoke test.
    """

    reason: str = ""
    full_retrain: bool = False
    dry_run: bool = False
    promote: Promote = "by_gate"

    def __post_init__(self) -> None:
        """Raise InputError for options that are invalid or contradict each other."""
        check_reason(self.reason)
        if self.promote not in get_args(Promote):
            raise InputError(f"promote is {shown(self.promote)}; set it to one of {', '.join(get_args(Promote))}")
        if self.promote == "force" and not self.reason.strip():
            raise InputError("promote is force, but there is no reason; give a reason, which is recorded on the new version")
        if self.promote == "force" and self.dry_run:
            raise InputError("promote is force, but a dry run registers no version; drop one of the two options")


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
    def read(cls, run: Run, *, until: StageName | None = None, requires_files: bool = True) -> Self:
        """Read the manifests in the run's folder, up to the stage `until`, without verifying checksums.

        A stage whose inputs changed or are missing is left out: the run was resumed with other settings, but not to its end.

        requires_files: whether to leave out a stage if one of its files is missing or has another size.
        """
        stage_names = list(STAGES)
        included_names = stage_names if until is None else stage_names[: stage_names.index(until) + 1]
        manifests = (
            load_manifest(run.folder / name, STAGES[name], verify=False)
            if requires_files
            else read_unchecked_manifest(run.folder / name, STAGES[name])
            for name in included_names
        )
        return cls(without_outdated(manifest for manifest in manifests if manifest is not None))

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
        return (self._manifest_by_type[stage_type] for stage_type in STAGES.values() if stage_type in self._manifest_by_type)

    @property
    def dataset(self) -> Dataset:
        """The ingested data; StageError if the interactions are not ingested yet."""
        return Dataset(
            self[InteractionsManifest],
            self.get(EmbeddingsManifest),
            self.get(FeaturesManifest),
            self.get(LogVectorsManifest),
        )


@dataclass(frozen=True)
class StageContext:
    """Everything that a stage needs apart from its settings.

    Attributes:
        experiment: MLflow experiment of the run.
        options: options of this run, which are not part of the config.
        until: last stage to run; None: all stages.
        pipeline: name of the pipeline; empty outside a flow.
        flow_run_id: id of the Prefect flow run; None outside a flow.
        flow_run_url: address of the flow run in the Prefect UI; None if there is no UI.
        results: the manifests of the stages that are complete.
    """

    run: Run
    experiment: str = ""
    options: RunOptions = field(default_factory=RunOptions)
    until: StageName | None = None
    pipeline: str = ""
    flow_run_id: str | None = None
    flow_run_url: str | None = None
    results: Results = field(default_factory=Results)

    def __post_init__(self) -> None:
        """Raise InputError if a run with a forced promotion ends before the promotion."""
        if self.options.promote == "force" and self.until not in (None, "register"):
            raise InputError(
                f"promote is force, but the run ends after {self.until} and registers no version; drop one of the two options"
            )

    @property
    def dataset(self) -> Dataset:
        """The ingested data; StageError if the interactions are not ingested yet."""
        return self.results.dataset

    def folder(self, manifest_type: type[Manifest]) -> Path:
        """Return the folder with the files and the manifest of the stage that `manifest_type` names."""
        return self.run.stage_folder(manifest_type)

    def previous_manifest(self, manifest_type: type[ManifestT]) -> ManifestT | None:
        """Return the manifest of the newest earlier run that completed this stage; None if there is none.

        Only a run in the folder of the nightly runs has earlier runs. A run of `nightjar plan` or `nightjar tune` has none.
        """
        if self.run.parent_name != RUNS_FOLDER_NAME:
            return None
        return Workspace(self.run.workspace).newest_manifest(manifest_type, before=self.run)
