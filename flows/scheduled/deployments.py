"""The deployments of a pipeline in a Prefect server, with their schedule, concurrency limit and default parameters.

`nightjar deploy` creates deployments for the workers of a work pool. The process flows.scheduled.deployment_process, which
`nightjar up` starts, creates deployments and runs them itself.
"""

from collections.abc import Collection

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy
from prefect.client.schemas.responses import DeploymentResponse
from prefect.deployments.runner import RunnerDeployment
from prefect.exceptions import ObjectNotFound
from prefect.schedules import Schedule
from prefect.types.entrypoint import EntrypointType

import recsys_core
from flows.champion import promote, rollback
from flows.delivery import recommend
from flows.refresh import refresh
from flows.scheduled.deployed import deployed_retrain
from flows.settings.config_file import LoadedConfig
from flows.settings.pipeline import PipelineConfig
from tasks import ENVIRONMENT

STRATEGY_BY_ON_OVERRUN = {"skip": ConcurrencyLimitStrategy.CANCEL_NEW, "queue": ConcurrencyLimitStrategy.ENQUEUE}
"""Prefect's collision strategy for each value of schedule.on_overrun."""


def deployments_of(
    loaded_config: LoadedConfig, *, work_pool_name: str | None, paused_flows: Collection[str] = ()
) -> tuple[RunnerDeployment, ...]:
    """Return the deployments nightly-retrain, promote, rollback, recommend and refresh of a pipeline.

    Only nightly-retrain is limited to one run at a time, so a person can roll back while a run trains. Only nightly-retrain and
    refresh may have a schedule.

    Args:
        loaded_config: config of the pipeline. Each run reads the file again when it starts. The overrides are the default of
            the field "Settings to override" in the forms.
        work_pool_name: work pool whose workers run the deployments. None: the process of `nightjar up` runs the deployments.
        paused_flows: names of the flows whose schedule a person has paused. These schedules stay paused.
    """
    config, schedule = loaded_config.config, loaded_config.config.schedule
    one_run_limit = ConcurrencyLimitConfig(limit=1, collision_strategy=STRATEGY_BY_ON_OVERRUN[schedule.on_overrun])
    deployments = []
    for flow in (deployed_retrain, promote, rollback, recommend, refresh):
        cron, is_active = schedule.cron_by_flow.get(flow.name), flow.name not in paused_flows
        deployment = flow.to_deployment(
            config.name,
            schedules=[Schedule(cron=cron, timezone=schedule.timezone, active=is_active)] if cron else [],
            concurrency_limit=one_run_limit if flow is deployed_retrain else None,
            parameters=loaded_config.flow_parameters,
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
    paused_flow_names = set()
    for flow_name, cron in config.schedule.cron_by_flow.items():
        deployment = read_deployment(client, config.name, flow_name=flow_name)
        deployed_schedules = [] if deployment is None else deployment.schedules
        if any(not schedule.active and getattr(schedule.schedule, "cron", None) == cron for schedule in deployed_schedules):
            paused_flow_names.add(flow_name)
    return paused_flow_names
