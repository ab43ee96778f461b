"""The deployments of a pipeline in a Prefect server, with their schedule, concurrency limit and default parameters.

`nightjar deploy` creates deployments for the workers of a work pool. The process flows.scheduled.deployment_process, which
`nightjar up` starts, creates deployments and runs them itself.
"""

from collections.abc import Collection
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy, VersionInfo
from prefect.client.schemas.responses import DeploymentResponse
from prefect.deployments.runner import RunnerDeployment
from prefect.exceptions import ObjectNotFound
from prefect.schedules import Schedule
from prefect.settings import get_current_settings
from prefect.types.entrypoint import EntrypointType

import recsys_core
from flows.champion import promote, rollback
from flows.delivery import recommend
from flows.refresh import refresh
from flows.scheduled.deployed import deployed_retrain
from flows.settings.config_file import LoadedConfig
from flows.settings.pipeline import PipelineConfig
from recsys_core.errors import InputError, shown_names
from tasks import ENVIRONMENT

STRATEGY_BY_ON_OVERRUN = {"skip": ConcurrencyLimitStrategy.CANCEL_NEW, "queue": ConcurrencyLimitStrategy.ENQUEUE}
"""Prefect's collision strategy for each value of schedule.on_overrun."""


def deployments_of(
    loaded: LoadedConfig, *, work_pool_name: str | None, paused_flows: Collection[str] = ()
) -> tuple[RunnerDeployment, ...]:
    """Return the deployments nightly-retrain, promote, rollback, recommend and refresh of a pipeline.

    Only nightly-retrain is limited to one run at a time, so a person can roll back while a run trains. Only nightly-retrain and
    refresh may have a schedule.

    Args:
        loaded: config of the pipeline. Each run reads the file again when it starts. The overrides are the default of the
            field "Settings to override" in the forms.
        work_pool_name: work pool whose workers run the deployments. None: the process of `nightjar up` runs the deployments.
        paused_flows: names of the flows whose schedule a person has paused. These schedules stay paused.
    """
    config, schedule = loaded.config, loaded.config.schedule
    one_run_at_a_time = ConcurrencyLimitConfig(limit=1, collision_strategy=STRATEGY_BY_ON_OVERRUN[schedule.on_overrun])
    deployments = []
    for flow in (deployed_retrain, promote, rollback, recommend, refresh):
        cron, is_active = schedule.cron_by_flow.get(flow.name), flow.name not in paused_flows
        deployment = flow.to_deployment(
            config.name,
            schedules=[Schedule(cron=cron, timezone=schedule.timezone, active=is_active)] if cron else [],
            concurrency_limit=one_run_at_a_time if flow is deployed_retrain else None,
            parameters=loaded.flow_parameters,
            tags=["nightjar", f"pipeline:{config.name}"],
            version=recsys_core.__version__,
            entrypoint_type=EntrypointType.MODULE_PATH,
            job_variables={"env": ENVIRONMENT} if work_pool_name else {},
        )
        assert isinstance(deployment, RunnerDeployment)
        deployment.work_pool_name = work_pool_name  # None removes the work pool of an existing deployment
        deployments.append(deployment)
    return tuple(deployments)


def read_deployment(
    client: SyncPrefectClient, pipeline_name: str, *, flow_name: str = deployed_retrain.name
) -> DeploymentResponse | None:
    """Return a deployment of a pipeline; None if it does not exist."""
    try:
        return client.read_deployment_by_name(f"{flow_name}/{pipeline_name}")
    except ObjectNotFound:
        return None


def paused_flows(client: SyncPrefectClient, config: PipelineConfig) -> set[str]:
    """Return the names of the flows whose schedule in `config` a person has paused."""
    paused_names = set()
    for flow_name, cron in config.schedule.cron_by_flow.items():
        deployment = read_deployment(client, config.name, flow_name=flow_name)
        prefect_schedules = [] if deployment is None else deployment.schedules
        if any(not entry.active and getattr(entry.schedule, "cron", None) == cron for entry in prefect_schedules):
            paused_names.add(flow_name)
    return paused_names


def changed_settings(current_deployment: DeploymentResponse | None, new_deployment: RunnerDeployment) -> list[list[str]]:
    """Return [setting, current value, new value] for each setting that differs; a new deployment differs in all."""
    current_settings = {} if current_deployment is None else _deployment_settings(current_deployment)
    return [
        [setting, current_settings.get(setting, "-"), new_value]
        for setting, new_value in _deployment_settings(new_deployment).items()
        if current_settings.get(setting) != new_value
    ]


def apply_deployment(deployment: RunnerDeployment) -> UUID:
    """Create or update the deployment; return its id."""
    # With explicit version information, Prefect does not look for a git repository in the current folder.
    deployment_id = deployment.apply(version_info=VersionInfo(type="prefect:simple", version=recsys_core.__version__))
    return UUID(str(deployment_id))


def choose_work_pool(client: SyncPrefectClient, requested_name: str | None) -> str:
    """Return `requested_name`, or the value of PREFECT_DEPLOYMENTS_DEFAULT_WORK_POOL_NAME if it is None.

    Raise InputError if the server has no work pool of this name.
    """
    name = requested_name or get_current_settings().deployments.default_work_pool_name
    existing_names = [work_pool.name for work_pool in client.read_work_pools()]
    if name in existing_names:
        return name
    problem = "--work-pool is missing" if name is None else f"--work-pool {name}: the Prefect server has no such work pool"
    raise InputError(
        f"{problem}; the server's work pools are {shown_names(existing_names) if existing_names else 'none'}; create one with: "
        f"prefect work-pool create {name or 'nightjar'} --type process"
    )


def _deployment_settings(deployment: RunnerDeployment | DeploymentResponse) -> dict[str, str]:
    """Return the settings that `changed_settings` compares. The keys are names of settings, the values are text."""
    if isinstance(deployment, RunnerDeployment):
        max_concurrent_runs = deployment.concurrency_limit
    else:
        global_limit = deployment.global_concurrency_limit
        max_concurrent_runs = global_limit.limit if global_limit else None
    concurrency_options = deployment.concurrency_options
    settings: dict[str, Any] = {
        "schedule": ", ".join(map(_describe_schedule, deployment.schedules or [])) or "none",
        "concurrent runs": str(max_concurrent_runs or "any number")
        + (f", {concurrency_options.collision_strategy.value}" if concurrency_options else ""),
        "pipeline": deployment.parameters.get("pipeline"),
        "overrides": ", ".join(deployment.parameters.get("overrides") or []) or "none",
        "work pool": deployment.work_pool_name or "none",
        "entry point": deployment.entrypoint,
        "tags": ", ".join(sorted(deployment.tags)),
        "version": deployment.version,
    }
    return {setting: str(value) for setting, value in settings.items()}


def _describe_schedule(prefect_schedule: Any) -> str:
    """Describe a schedule of a deployment: cron expression, time zone, and whether it is paused."""
    schedule = prefect_schedule.schedule
    schedule_text = f"{schedule.cron} {schedule.timezone or 'UTC'}" if hasattr(schedule, "cron") else str(schedule)
    return schedule_text if prefect_schedule.active is not False else f"{schedule_text}, paused"
