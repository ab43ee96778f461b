"""The history of a workspace: its runs, how each ended, and their figures."""

import math
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from recsys_core.disk import used_bytes
from recsys_core.manifests import DataReportManifest, RegistrationManifest, read_unchecked_manifest
from tasks.run import RUN_ID, Run
from tasks.run_record import ERROR_LOG_NAME, RECORD_NAME, RunFigures, RunRecord, RunState

PATH_BY_PAGE = {
    "report": "check_data/report.html",
    "plan": "plan_sharding/plan.html",
    "loss": "loss.png",
    "recall": "recall.png",
    "indexes": "indexes.png",
    "error log": ERROR_LOG_NAME,
}
"""Names of the links to a run's pages and plots, each with the path of the file relative to the run's folder."""
STATE_NAMES: dict[RunState, str] = {
    "Running": "running",
    "Promoted": "promoted",
    "NotPromoted": "not promoted",
    "BrokenChampion": "broken champion",
    "DataRejected": "data rejected",
    "DryRun": "dry run",
    "StoppedAfterStage": "stopped after a stage",
    "Failed": "failed",
    "Interrupted": "interrupted",
}
"""Text of each state in tables and on the page of the last runs."""
_TIME_IN_RUN_ID = re.compile(r"(\d{8}-\d{6})-")


@dataclass(frozen=True)
class PastRun:
    """One run of the history.

    Attributes:
        run: the run, with its folder.
        record: how the run ended, and its figures.
    """

    run: Run
    record: RunRecord

    @cached_property
    def disk_bytes(self) -> int:
        """Space that the run's folder takes on the disk."""
        return used_bytes(self.run.folder)

    @property
    def page_paths(self) -> dict[str, str]:
        """Existing pages and plots: name of the link -> path relative to the workspace."""
        paths = {name: self.run.folder / path for name, path in PATH_BY_PAGE.items()}
        return {name: str(path.relative_to(self.run.workspace)) for name, path in paths.items() if path.is_file()}

    def new_version_metric(self, name: str) -> float | None:
        """Return the metric `name`, e.g. recall@20, of the served recommendations of the new version; None if not measured."""
        return self._metric(f"served/{name}")

    def champion_metric(self, name: str) -> float | None:
        """Return the metric `name` of the champion that the version was compared with; None without a comparison."""
        return self._metric(f"champion/{name}")

    def _metric(self, name: str) -> float | None:
        value = self.record.figures.metrics.get(name)
        return None if value is None or math.isnan(value) else value

    def as_json(self, *, metric: str) -> dict[str, Any]:
        """Return the run as a JSON object. Times are in UTC."""
        record = self.record.model_dump(mode="json", exclude={"format_version", "figures", "options", "pid"})
        figures = self.record.figures.model_dump(mode="json", exclude={"metrics"})
        values = {"metric": metric, "new": self.new_version_metric(metric), "champion": self.champion_metric(metric)}
        return {
            "run_id": self.run.run_id,
            "run_dir": str(self.run.folder),
            **record,
            "reason": self.record.options.reason,
            "seconds": self.record.seconds,
            **values,
            **figures,
            "disk_bytes": self.disk_bytes,
        }


def run_history(workspace: str | Path, *, last: int | None = None) -> list[PastRun]:
    """Return the runs of `workspace`, the newest start first, and at most `last` of them."""
    workspace = Path(workspace).absolute()
    folders = [path for path in (workspace / "runs").glob("*") if RUN_ID.fullmatch(path.name) and _is_run(path)]
    runs = [Run(path.name, workspace=workspace, experiment="") for path in folders]
    past_runs = [PastRun(run, RunRecord.read(run) or _record_from_manifests(run)) for run in runs]
    return sorted(past_runs, key=lambda past_run: (past_run.record.started, past_run.run.run_id), reverse=True)[:last]


def newest_promoted_version(runs: list[PastRun]) -> str | None:
    """Return the version that the newest promotion in `runs` made champion; None without a promotion.

    A rollback in the registry is not in the history.
    """
    return next((past_run.record.figures.version for past_run in runs if past_run.record.figures.promoted), None)


def format_count(count: int | None) -> str:
    """Format a count with at most three digits and a unit.

    >>> [format_count(count) for count in (None, 0, 999, 1_000, 25_431, 999_999, 1_234_567, 20_000_000_000)]
    ['-', '0', '999', '1.00 k', '25.4 k', '1.00 M', '1.23 M', '20.0 G']
    """
    if count is None:
        return "-"
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        scaled = count / factor
        if scaled >= 0.9995:
            digits = 2 if scaled < 9.995 else 1 if scaled < 99.95 else 0
            return f"{scaled:.{digits}f} {unit}"
    return str(count)


def _is_run(folder: Path) -> bool:
    return not folder.is_symlink() and any((folder / name).is_file() for name in (RECORD_NAME, "config.yaml"))


def _record_from_manifests(run: Run) -> RunRecord:
    """Return a record for a run of an earlier version of nightjar, which did not write run.json."""
    registration = read_unchecked_manifest(run.stage_folder("register"), RegistrationManifest)
    report = read_unchecked_manifest(run.stage_folder("check_data"), DataReportManifest)
    state: RunState
    if run.is_locked():
        state, message = "Running", ""
    elif registration is not None:
        state, message = "Promoted" if registration.promoted else "NotPromoted", "; ".join(registration.reasons)
    elif report is not None and report.breaches:
        state, message = "DataRejected", "; ".join(report.breaches)
    else:
        state, message = "Interrupted", f"the folder has no {RECORD_NAME} and no registered version"
    time_match = _TIME_IN_RUN_ID.match(run.run_id)
    if time_match is not None:
        started = datetime.strptime(time_match[1], "%Y%m%d-%H%M%S").replace(tzinfo=UTC)
    else:
        started = datetime.fromtimestamp(run.folder.stat().st_mtime, UTC)
    return RunRecord(
        pipeline="", options=run.options, host="", pid=0, started=started, state=state, message=message,
        figures=RunFigures.read(run),
    )  # fmt: skip
