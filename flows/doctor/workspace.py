"""Checks of the workspace for `nightjar doctor FILE`: free disk space, and the end of the previous run."""

from datetime import UTC, datetime
from pathlib import Path

from flows.config import PipelineConfig
from flows.doctor.finding import Finding, not_used, ok, problem
from recsys_core.disk import free_bytes
from recsys_core.units import format_gib
from tasks.run import Run
from tasks.run_record import RunRecord

DISK_RESERVE_FACTOR = 1.2
"""Free space that a run needs, as a multiple of the size of the previous run."""
ADVICE_BY_STATE = {
    "Failed": "resume it with --resume {run_id}",
    "Interrupted": "resume it with --resume {run_id}",
    "DataRejected": "read check_data/report.html in its folder, then correct the data or the limits of data_report",
    "BrokenChampion": "return to a former champion with nightjar rollback --reason TEXT",
}
"""States of a run after which a person must act, each with the next step."""


def check_disk(workspace: Path) -> Finding:
    """Compare the free space of the workspace's disk with the size of the previous run."""
    num_free_bytes = free_bytes(workspace)
    run_folder = _newest_run_folder(workspace)
    if run_folder is None:
        return ok(f"{format_gib(num_free_bytes)} free in {workspace}; no run yet")
    run_bytes = sum(path.stat(follow_symlinks=False).st_size for path in run_folder.rglob("*") if path.is_file())
    disk_text = f"{format_gib(num_free_bytes)} free in {workspace}; run {run_folder.name} takes {format_gib(run_bytes)}"
    if num_free_bytes < DISK_RESERVE_FACTOR * run_bytes:
        return problem(
            f"{disk_text}, and the next run needs about the same space; remove old runs, or set workspace to a larger disk"
        )
    return ok(disk_text)


def check_previous_run(config: PipelineConfig) -> Finding:
    """Report when the newest run ended and in which state; a failed, rejected or overdue run is a problem."""
    run_folder = _newest_run_folder(config.workspace)
    if run_folder is None:
        return not_used("no run yet")
    run = Run(run_folder.name, workspace=config.workspace, experiment=config.registry.experiment)
    record = RunRecord.read(run)
    if record is None:
        return not_used(f"run {run.run_id} has no run.json: an older version of nightjar made it")
    if record.state == "Running":
        minutes = (datetime.now(UTC) - record.started).total_seconds() / 60
        run_text = f"run {run.run_id} is running for {minutes:,.0f} minutes (process {record.pid} on {record.host})"
        deadline = config.schedule.deadline_minutes
        if deadline is not None and minutes > deadline:
            return problem(
                f"{run_text}, longer than schedule.deadline_minutes {deadline}; read its log in Prefect, or cancel it"
            )
        return ok(run_text)
    end_time = "" if record.ended is None else f" at {record.ended:%Y-%m-%d %H:%M} UTC"
    run_text = f"run {run.run_id} ended{end_time}: {record.state}{f', {record.message}' if record.message else ''}"
    if record.state in ADVICE_BY_STATE:
        return problem(f"{run_text}; {ADVICE_BY_STATE[record.state].format(run_id=run.run_id)}")
    return ok(run_text)


def _newest_run_folder(workspace: Path) -> Path | None:
    return max((path for path in (workspace / "runs").glob("*") if path.is_dir()), default=None)
