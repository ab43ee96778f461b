"""Checks of the planned runs and refreshes for `nightjar doctor FILE`."""

import os
from datetime import UTC, datetime

from filelock import FileLock, Timeout
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import DeploymentFilter, FlowRunFilter
from prefect.client.schemas.objects import DeploymentStatus
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import CronSchedule
from prefect.client.schemas.sorting import FlowRunSort
from prefect.exceptions import ObjectNotFound

from flows.doctor.servers import PREFECT_ERRORS, Finding, not_used, ok, problem, short_prefect_client
from flows.settings.pipeline import PipelineConfig
from tasks.runs.workspace import UP_LOCK_NAME

MAX_LATENESS_S = 300.0
"""A planned run counts as late if it has not started this long after its planned start."""
_SETTING_BY_FLOW = {"nightly-retrain": "schedule.cron", "refresh": "schedule.refresh_cron"}


def check_schedule(config: PipelineConfig, *, flow_name: str) -> Finding:
    """Check that `nightjar up`, or a deployment on the server of PREFECT_API_URL, starts the planned runs of a flow.

    Args:
        flow_name: nightly-retrain or refresh.
    """
    if not os.environ.get("PREFECT_API_URL"):
        return _check_up_is_running(config, flow_name)
    try:
        with short_prefect_client() as client:
            return _check_deployment(client, config, flow_name)
    except PREFECT_ERRORS:
        return not_used("unknown, because the Prefect server does not answer")


def _check_up_is_running(config: PipelineConfig, flow_name: str) -> Finding:
    """Check that `nightjar up`, which holds a lock of the workspace, is running."""
    setting = _SETTING_BY_FLOW[flow_name]
    next_start = config.schedule.next_start(datetime.now(UTC), flow_name=flow_name)
    if next_start is None:
        return not_used(f"{setting} is empty: {flow_name} is started by hand only")
    lock_file = config.workspace / UP_LOCK_NAME
    try:
        if lock_file.exists():
            FileLock(lock_file).acquire(timeout=0).lock.release()
    except Timeout:
        return ok(f"`nightjar up` is running: next run at {next_start:%Y-%m-%d %H:%M %Z}")
    return problem(
        f"{setting} is {config.schedule.cron_by_flow[flow_name]}, but nothing starts the runs; start `nightjar up`, or set "
        "PREFECT_API_URL to the server of the deployment"
    )


def _check_deployment(client: SyncPrefectClient, config: PipelineConfig, flow_name: str) -> Finding:
    """Check a deployment of the pipeline: its schedule, the process that starts its runs, and its next run."""
    setting, cron = _SETTING_BY_FLOW[flow_name], config.schedule.cron_by_flow[flow_name]
    deployment_text = f"deployment {flow_name}/{config.name}"
    try:
        deployment = client.read_deployment_by_name(f"{flow_name}/{config.name}")
    except ObjectNotFound:
        if flow_name == "refresh" and cron is None:
            return not_used(f"{setting} is empty: {flow_name} is started by hand only")
        return problem(f"the server has no {deployment_text}; create it with `nightjar deploy`")
    cron_schedules = [
        (f"{prefect_schedule.schedule.cron} {prefect_schedule.schedule.timezone or 'UTC'}", prefect_schedule.active)
        for prefect_schedule in deployment.schedules
        if isinstance(prefect_schedule.schedule, CronSchedule)
    ]
    deployed_text = ", ".join(text for text, _ in cron_schedules) or "none"
    config_text = f"{cron} {config.schedule.timezone}" if cron else "none"
    if deployed_text != config_text:
        return problem(
            f"{deployment_text} has the schedule {deployed_text}, but the config has {config_text} ({setting} and "
            "schedule.timezone); apply the config with `nightjar deploy`"
        )
    if deployment.status != DeploymentStatus.READY:
        pool_name = deployment.work_pool_name
        process_text = "`nightjar up`" if pool_name is None else f"a worker: prefect worker start --pool {pool_name}"
        return problem(f"no process starts the runs of {deployment_text}; start {process_text}")
    if not cron_schedules:
        return not_used(f"{deployment_text} has no schedule: runs are started by hand only")
    if deployment.paused or not all(is_active for _, is_active in cron_schedules):
        return problem(
            f"{deployment_text} or its schedule {deployed_text} is paused; resume it on the deployment page in Prefect"
        )
    return _check_next_run(client, deployment, deployment_text=deployment_text)


def _check_next_run(client: SyncPrefectClient, deployment: DeploymentResponse, *, deployment_text: str) -> Finding:
    next_runs = client.read_flow_runs(
        deployment_filter=DeploymentFilter.model_validate({"id": {"any_": [deployment.id]}}),
        flow_run_filter=FlowRunFilter.model_validate({"state": {"type": {"any_": ["SCHEDULED"]}}}),
        sort=FlowRunSort.NEXT_SCHEDULED_START_TIME_ASC,
        limit=1,
    )
    planned_start = next_runs[0].next_scheduled_start_time if next_runs else None
    if planned_start is None:
        return problem(
            f"{deployment_text} has an active schedule but no planned run; check that the server runs its scheduler service"
        )
    next_run_text = f"{deployment_text}: next run at {planned_start.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
    if (datetime.now(UTC) - planned_start).total_seconds() > MAX_LATENESS_S:
        return problem(
            f"{next_run_text}, which is late; check the workers, the work pool and the concurrency limit of the deployment"
        )
    return ok(next_run_text)
