"""Results of a run, read from its folder: manifests, metrics, training log, reports and plots."""

import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.runs.run_history import existing_pages
from recsys_core.errors import InputError, StageError
from recsys_core.manifests import (
    DataReportManifest,
    Dataset,
    EvaluationManifest,
    InteractionsManifest,
    Manifest,
    RegistrationManifest,
    StageName,
    TrainManifest,
)
from tasks.runs.context import Results
from tasks.runs.run import REDUCED_FILE_NAME, REFIT_FILE_NAME, Run
from tasks.runs.workspace import Workspace

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class RunResults:
    """The completed stages of a run.

    Attributes:
        run: the run, with its folder.
        stages: the manifests of the completed stages, by type of the manifest.
    """

    run: Run
    stages: Results

    @classmethod
    def read(cls, run: Run, *, until: StageName | None = None) -> "RunResults":
        """Read the manifests in the run's folder, up to the stage `until`, without verifying checksums.

        They are read even if retention has removed the run's large files, because they contain the metrics.
        """
        return cls(run, Results.read(run, until=until, requires_files=not _is_reduced(run)))

    @property
    def manifests(self) -> dict[str, Manifest]:
        """The manifest of each completed stage, by name of the stage."""
        return {manifest.stage: manifest for manifest in self.stages}

    @property
    def dataset(self) -> Dataset:
        """The ingested data; StageError if the interactions are not ingested yet, or if retention has removed them."""
        if not _is_reduced(self.run):
            return self.stages.dataset
        complete_stages = Results.read(self.run)  # retention keeps the data that a later run needs
        if complete_stages.get(InteractionsManifest) is None:
            raise StageError(
                f"{self.run.folder}: the data of run {self.run.run_id} is removed, because the run is older than the runs that "
                "retention.keep_full_runs keeps; open a newer run"
            )
        return complete_stages.dataset

    @property
    def refit_version(self) -> str | None:
        """Version number of the run's refit; None if there is no refit."""
        refit_file = self.run.folder / REFIT_FILE_NAME
        return str(json.loads(refit_file.read_bytes())["version"]) if refit_file.is_file() else None

    @property
    def registration(self) -> RegistrationManifest | None:
        """The registered version; None if the stage `register` is not complete."""
        return self.stages.get(RegistrationManifest)

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the stages `evaluate` and `register`.

        The stage `evaluate` measures the model and the baselines exactly. The stage `register` measures the recommendations
        that the new version and the champion serve.
        """
        evaluation = self.stages.get(EvaluationManifest)
        exact_metrics = {} if evaluation is None else evaluation.metrics
        return exact_metrics | ({} if self.registration is None else self.registration.metrics)

    @cached_property
    def training_log(self) -> "pd.DataFrame":
        """metrics.jsonl as a table: step, epoch, loss, learning_rate, samples_per_s, and a column per validation metric."""
        import pandas as pd

        log_path = self.run.stage_folder(TrainManifest) / "metrics.jsonl"
        if not log_path.is_file():
            raise StageError(f"{log_path} does not exist: the run has no completed stage train; resume the run")
        return pd.json_normalize([json.loads(line) for line in log_path.read_text().splitlines()])

    @property
    def report_path(self) -> Path:
        """Path of the data report, an HTML page; StageError if the data is not checked yet."""
        path = self.run.stage_folder(DataReportManifest) / "report.html"
        if not path.is_file():
            raise StageError(f"{path} does not exist: the run has no completed stage check_data; resume the run")
        return path

    @property
    def page_paths(self) -> dict[str, Path]:
        """Paths of reports and plots of the run by file name, such as report.html, plan.html, loss.png and indexes.png."""
        return {path.name: path for path in existing_pages(self.run).values()}

    def as_json(self) -> str:
        """Return run id, folder, registered versions, metrics and seconds per stage as one line of JSON."""
        registration, refit_version = self.registration, self.refit_version
        summary: dict[str, Any] = {
            "run_id": self.run.run_id,
            "run_dir": str(self.run.folder),
            "model": registration
            and {
                "name": registration.model_name,
                "version": registration.version,
                "alias": registration.alias if refit_version is None else None,  # the refit has the alias
            },
            "refit": refit_version and {"version": refit_version, "alias": "champion"},
            "alarm": registration and registration.alarm,
            # JSON cannot represent NaN.
            "metrics": {name: None if math.isnan(value) else value for name, value in self.metrics.items()},
            "stages": {manifest.stage: {"seconds": round(manifest.seconds, 3)} for manifest in self.stages},
        }
        return json.dumps(summary, allow_nan=False)


def _is_reduced(run: Run) -> bool:
    """Return whether retention has removed the large files of the run."""
    return (run.folder / REDUCED_FILE_NAME).exists()


def open_run(workspace: str | Path, run_id: str | None = None) -> RunResults:
    """Open a run of `workspace`, by default the newest run; raise InputError if it does not exist."""
    run_by_id = {run.run_id: run for run in Workspace(Path(workspace).absolute()).runs()}
    runs_folder = Path(workspace).absolute() / "runs"
    if not run_by_id:
        raise InputError(f"{runs_folder}: there is no run; start one with `nightjar run`")
    if run_id is not None and run_id not in run_by_id:
        raise InputError(f"{runs_folder}: there is no run {run_id}; there are {', '.join(run_by_id)}")
    return RunResults.read(run_by_id[run_id] if run_id is not None else list(run_by_id.values())[-1])
