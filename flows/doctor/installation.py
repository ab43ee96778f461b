"""Checks of an installation for `nightjar doctor FILE`: servers, schedules, disk and shared memory."""

import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from flows.doctor.schedule import check_schedule
from flows.doctor.servers import Finding, check_mlflow, check_prefect, not_used, ok, problem
from flows.settings.pipeline import PipelineConfig
from recsys_core.disk import free_bytes, used_bytes
from recsys_core.errors import NightjarError, first_line
from recsys_core.units import GIB, MIB, format_gib
from tasks.retention.budget import estimated_bytes
from tasks.runs.workspace import Workspace

CHECK_TIMEOUT_S = 5.0
MASTER_TIMEOUT_S = 2.0
DISK_RESERVE_FACTOR = 1.2
"""Free space that a run needs, as a multiple of the size of an earlier run."""
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 the mount point is a convention of Linux
MIN_SHARED_MEMORY_BYTES = 128 * MIB
"""Twice the default of container engines. With the default size, NCCL fails to start."""


def examine(config: PipelineConfig) -> dict[str, Finding]:
    """Return the findings of all checks of the installation of `config`, by subject. Nothing is created or changed."""
    return run_checks(
        {
            "Prefect server": check_prefect,
            "MLflow server": lambda: check_mlflow(config),
            "schedule": lambda: check_schedule(config, flow_name="nightly-retrain"),
            "refreshes": lambda: check_schedule(config, flow_name="refresh"),
            "log engine": lambda: check_log_engine(config),
            "disk": lambda: check_disk(config.workspace, budget_gib=config.retention.disk_budget_gb),
            "shared memory": lambda: check_shared_memory(SHARED_MEMORY),
        }
    )


def run_checks(checks: Mapping[str, Callable[[], Finding]], *, timeout_s: float = CHECK_TIMEOUT_S) -> dict[str, Finding]:
    """Run all checks at the same time and return their findings. A check that raises or takes too long is a problem."""
    finding_by_subject: dict[str, Finding] = {}

    def run_check(subject: str, check: Callable[[], Finding]) -> None:
        try:
            finding_by_subject[subject] = check()
        except Exception as error:  # any error of a library
            finding_by_subject[subject] = problem(f"{type(error).__name__}: {first_line(error)}")

    # The threads are daemons, because the command may end before a check does.
    threads = [threading.Thread(target=run_check, args=subject_and_check, daemon=True) for subject_and_check in checks.items()]
    deadline_s = time.monotonic() + timeout_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    timeout_finding = problem(f"no result within {timeout_s:g} s; check that the server answers, or that the disk is mounted")
    return {subject: finding_by_subject.get(subject, timeout_finding) for subject in checks}


def check_log_engine(config: PipelineConfig) -> Finding:
    """Check that the engine of the log ingest is installed, and that the master of its cluster answers."""
    try:
        engine_text = config.interactions.engine.installation_text()
        config.interactions.engine.check_master(timeout_s=MASTER_TIMEOUT_S)
    except NightjarError as error:
        return problem(str(error))
    return not_used("the engine DuckDB is installed with nightjar") if engine_text is None else ok(engine_text)


def check_disk(workspace: Path, *, budget_gib: float | None) -> Finding:
    """Compare the free disk space, and the free part of the workspace's budget, with the size of earlier runs.

    The newest run may have failed before it wrote all its files, so the newest run with all files is compared too.

    Args:
        budget_gib: retention.disk_budget_gb.
    """
    num_free_bytes, workspace_runs = free_bytes(workspace), Workspace(workspace)
    newest_run = workspace_runs.newest_run()
    if newest_run is None:
        return ok(f"{format_gib(num_free_bytes)} free in {workspace}; no run yet")
    new_run_bytes = estimated_bytes(workspace_runs.run(workspace_runs.new_run_id()))
    largest_run_bytes = max(used_bytes(newest_run.folder), new_run_bytes)
    disk_text = f"{format_gib(num_free_bytes)} free in {workspace}; the next run needs about {format_gib(largest_run_bytes)}"
    if num_free_bytes < DISK_RESERVE_FACTOR * largest_run_bytes:
        return problem(f"{disk_text}, like earlier runs; remove old runs, or set workspace to a larger disk")
    if budget_gib is None:
        return ok(disk_text)
    workspace_bytes = used_bytes(workspace)
    budget_text = (
        f"{disk_text}; the workspace has {format_gib(workspace_bytes)}, and retention.disk_budget_gb is {budget_gib:g}"
    )
    if workspace_bytes + new_run_bytes > budget_gib * GIB:
        return problem(
            f"{budget_text}, so the next run cleans the workspace, and fails if it is still too large; raise "
            "disk_budget_gb, or lower retention.keep_full_runs or retention.keep_versions and run `nightjar clean`"
        )
    return ok(budget_text)


def check_shared_memory(folder: Path) -> Finding:
    """Check the size of the shared memory, which is small in containers."""
    if not folder.is_dir():
        return problem(f"{folder} does not exist; mount a tmpfs there")
    usage = shutil.disk_usage(folder)
    usage_text = f"{folder}: {format_gib(usage.free)} free of {format_gib(usage.total)}"
    if usage.free < MIN_SHARED_MEMORY_BYTES:
        return problem(
            f"{usage_text}; the ranks need {format_gib(MIN_SHARED_MEMORY_BYTES, digits=3)}; remove stale files there, or start "
            "the container with more (--shm-size, shm_size, or an emptyDir with medium Memory)"
        )
    return ok(usage_text)
