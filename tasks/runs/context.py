"""The context of a stage: the run, its options, and the results of earlier stages."""

from dataclasses import dataclass, field
from pathlib import Path

from recsys_core.errors import InputError
from recsys_core.manifests import Dataset, Manifest, ManifestT, StageName
from tasks.runs.options import RunOptions
from tasks.runs.results import Results
from tasks.runs.run import RUNS_FOLDER_NAME, Run
from tasks.runs.workspace import Workspace


@dataclass(frozen=True)
class StageContext:
    """Everything that a stage needs apart from its settings.

    Attributes:
        experiment: MLflow experiment of the run.
        options: options of this run, which are not part of the config.
        until: last stage to run; None: all stages.
        pipeline: name of the pipeline; empty outside a flow.
        flow_run_id: id of the Prefect flow run; None outside a flow.
        flow_run_url: address of the flow run in the Prefect UI; None without a UI.
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

    def folder(self, stage: type[Manifest]) -> Path:
        """Return the folder of a stage's files and manifest. `stage` is the type of its manifest."""
        return self.run.stage_folder(stage)

    def previous(self, stage: type[ManifestT]) -> ManifestT | None:
        """Return the manifest of this stage from the newest earlier run that completed it; None if there is none.

        Runs outside the folder of the nightly runs, such as those of `nightjar plan` and `nightjar tune`, have no earlier run.
        """
        if self.run.parent != RUNS_FOLDER_NAME:
            return None
        return Workspace(self.run.workspace).newest_manifest(stage, before=self.run)
