"""Results of a run, read from its folder: manifests, metrics, training log, reports and plots."""

import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from recsys_core.errors import InputError, StageError
from recsys_core.manifests import (
    Dataset,
    EmbeddingsManifest,
    EvaluationManifest,
    FeaturesManifest,
    InteractionsManifest,
    Manifest,
    RegistrationManifest,
    load_manifest,
)
from tasks.runs.run import STAGES, Run, StageName

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class RunResults:
    """The completed stages of a run.

    Attributes:
        run: the run, with its folder.
        manifests: the manifest of each completed stage.
    """

    run: Run
    manifests: dict[StageName, Manifest]

    @classmethod
    def read(cls, run: Run, *, until: StageName | None = None) -> "RunResults":
        """Read the manifests in the run's folder, up to the stage `until`, without verifying checksums."""
        all_stages = list(STAGES)
        included_stages = all_stages if until is None else all_stages[: all_stages.index(until) + 1]
        manifests = {stage: load_manifest(run.stage_folder(stage), STAGES[stage], verify=False) for stage in included_stages}
        return cls(run, {stage: manifest for stage, manifest in manifests.items() if manifest is not None})

    @property
    def dataset(self) -> Dataset:
        """The ingested data; StageError if the interactions are not ingested yet."""
        if "ingest_interactions" not in self.manifests:
            raise StageError(f"{self.run.folder} has no completed stage ingest_interactions; resume the run")
        return Dataset(
            cast(InteractionsManifest, self.manifests["ingest_interactions"]),
            cast(EmbeddingsManifest | None, self.manifests.get("ingest_embeddings")),
            cast(FeaturesManifest | None, self.manifests.get("ingest_features")),
        )

    @property
    def registration(self) -> RegistrationManifest | None:
        """The registered version; None if the stage register is not complete."""
        return cast(RegistrationManifest | None, self.manifests.get("register"))

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the stages `evaluate` and `register`.

        The stage `evaluate` measures the model and the baselines exactly. The stage `register` measures the recommendations
        that the new version and the champion serve.
        """
        evaluation = cast(EvaluationManifest | None, self.manifests.get("evaluate"))
        exact_metrics = {} if evaluation is None else evaluation.metrics
        return exact_metrics | ({} if self.registration is None else self.registration.metrics)

    @cached_property
    def training_log(self) -> "pd.DataFrame":
        """metrics.jsonl as a table: step, epoch, loss, learning_rate, samples_per_s, and a column per validation metric."""
        import pandas as pd

        log_path = self.run.stage_folder("train") / "metrics.jsonl"
        if not log_path.is_file():
            raise StageError(f"{log_path} does not exist: the run has no completed stage train; resume the run")
        return pd.json_normalize([json.loads(line) for line in log_path.read_text().splitlines()])

    @property
    def report_path(self) -> Path:
        """Path of the data report, an HTML page; StageError if the data is not checked yet."""
        path = self.run.stage_folder("check_data") / "report.html"
        if not path.is_file():
            raise StageError(f"{path} does not exist: the run has no completed stage check_data; resume the run")
        return path

    @property
    def page_paths(self) -> dict[str, Path]:
        """Paths of reports and plots of the run by file name: report.html, plan.html, loss.png, indexes.png."""
        paths = [
            self.run.stage_folder("check_data") / "report.html",
            self.run.stage_folder("plan_sharding") / "plan.html",
            self.run.folder / "loss.png",
            self.run.folder / "indexes.png",
        ]
        return {path.name: path for path in paths if path.is_file()}

    def as_json(self) -> str:
        """Return run id, folder, registered version, metrics and seconds per stage as one line of JSON."""
        registration = self.registration
        summary: dict[str, Any] = {
            "run_id": self.run.run_id,
            "run_dir": str(self.run.folder),
            "model": registration
            and {"name": registration.model_name, "version": registration.version, "alias": registration.alias},
            "alarm": registration and registration.alarm,
            # JSON cannot represent NaN.
            "metrics": {name: None if math.isnan(value) else value for name, value in self.metrics.items()},
            "stages": {stage: {"seconds": round(manifest.seconds, 3)} for stage, manifest in self.manifests.items()},
        }
        return json.dumps(summary, allow_nan=False)


def open_run(workspace: str | Path, run_id: str | None = None) -> RunResults:
    """Open a run of `workspace`, by default the newest run; raise InputError if it does not exist."""
    runs_folder = Path(workspace).absolute() / "runs"
    run_ids = sorted(path.name for path in runs_folder.glob("*") if path.is_dir())
    if not run_ids:
        raise InputError(f"{runs_folder}: there is no run; start one with `nightjar run`")
    if run_id is not None and run_id not in run_ids:
        raise InputError(f"{runs_folder}: there is no run {run_id}; there are {', '.join(run_ids)}")
    run = Run(run_id or run_ids[-1], workspace=Path(workspace).absolute(), experiment="")
    return RunResults.read(run)
