"""The history of a workspace: its runs, with the end state, counts, durations and metrics of each run."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from recsys_core.disk import used_bytes
from recsys_core.manifests import STAGES
from tasks.runs.run import Run
from tasks.runs.run_record import ERROR_LOG_NAME, RunRecord, RunState
from tasks.runs.workspace import Workspace

STATE_NAMES: dict[RunState, str] = {
    "Running": "running",
    "Promoted": "promoted",
    "NotPromoted": "not promoted",
    "NotEnoughData": "not enough data",
    "BrokenChampion": "broken champion",
    "DataRejected": "data rejected",
    "DryRun": "dry run",
    "StoppedEarly": "stopped early",
    "Failed": "failed",
    "Interrupted": "interrupted",
}
"""Text of each state in tables and on the page of the last runs."""


@dataclass(frozen=True)
class PastRun:
    """One run of the history.

    Attributes:
        run: the run, with its folder.
        record: how the run ended, and its figures: counts, durations and metrics.
    """

    run: Run
    record: RunRecord

    @cached_property
    def disk_bytes(self) -> int:
        """Space that the run's folder takes on the disk."""
        return used_bytes(self.run.folder)

    @property
    def page_paths(self) -> dict[str, str]:
        """Paths of the existing pages and plots relative to the workspace, by text of the link."""
        return {link: str(path.relative_to(self.run.workspace)) for link, path in existing_pages(self.run).items()}

    def new_version_metric(self, metric_name: str) -> float | None:
        """Return a metric of the new version's served recommendations, e.g. recall@20; None if it was not measured."""
        return self._metric(f"served/{metric_name}")

    def champion_metric(self, metric_name: str) -> float | None:
        """Return a metric of the champion that the new version was compared with; None if there is no comparison."""
        return self._metric(f"champion/{metric_name}")

    def _metric(self, logged_name: str) -> float | None:
        value = self.record.figures.metrics.get(logged_name)
        return None if value is None or math.isnan(value) else value

    def as_json(self, *, metric_name: str) -> dict[str, Any]:
        """Return the run as a JSON object. Times are in UTC."""
        record_fields = self.record.model_dump(mode="json", exclude={"format_version", "figures", "options", "pid"})
        figure_fields = self.record.figures.model_dump(mode="json", exclude={"metrics"})
        return {
            "run_id": self.run.run_id,
            "run_dir": str(self.run.folder),
            **record_fields,
            "reason": self.record.options.reason,
            "seconds": self.record.seconds,
            "metric": metric_name,
            "new": self.new_version_metric(metric_name),
            "champion": self.champion_metric(metric_name),
            **figure_fields,
            "disk_bytes": self.disk_bytes,
        }


def existing_pages(run: Run) -> dict[str, Path]:
    """Return the paths of the run's pages and plots that exist, by text of the link."""
    link_path_pairs = [pair for stage in STAGES.values() for pair in stage.pages.items()] + [("error log", ERROR_LOG_NAME)]
    return {link: run.folder / path for link, path in link_path_pairs if (run.folder / path).is_file()}


def run_history(workspace: str | Path, *, max_runs: int | None = None) -> list[PastRun]:
    """Return the runs of `workspace` that have a record, the newest first (see Workspace.runs); at most `max_runs` runs."""
    run_record_pairs = ((run, RunRecord.read(run)) for run in reversed(Workspace(Path(workspace).absolute()).runs()))
    return list(islice((PastRun(run, record) for run, record in run_record_pairs if record is not None), max_runs))


def newest_promoted_version(past_runs: Sequence[PastRun]) -> str | None:
    """Return the version of the newest promotion in `past_runs`; None if there is no promotion.

    The champion may be another version, because a rollback is not in the history.
    """
    last_promotion = last_to_end(past_run for past_run in past_runs if past_run.record.figures.promoted)
    return None if last_promotion is None else last_promotion.record.figures.version


def last_to_end(past_runs: Iterable[PastRun]) -> PastRun | None:
    """Return the run that ended last; None if there is no run. A resumed run may end last although its run id is older.

    A run without an end counts with its start. The clock may be set back, so a time in the future counts only if all times are.
    """
    now = datetime.now(UTC)

    def end_key(past_run: PastRun) -> tuple[bool, datetime]:
        end = past_run.record.ended or past_run.record.started
        return end <= now, end

    return max(past_runs, key=end_key, default=None)


def format_count(count: int | None) -> str:
    """Format a count with at most three digits and a unit.

    >>> [format_count(count) for count in (None, 0, 999, 1_000, 25_431, 999_999, 1_234_567, 20_000_000_000)]
    ['-', '0', '999', '1.00 k', '25.4 k', '1.00 M', '1.23 M', '20.0 G']
    """
    if count is None:
        return "-"
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        scaled_count = count / factor
        if scaled_count >= 0.9995:
            num_decimals = 2 if scaled_count < 9.995 else 1 if scaled_count < 99.95 else 0
            return f"{scaled_count:.{num_decimals}f} {unit}"
    return str(count)
