"""The deployments of a pipeline in a Prefect server, with their schedule, concurrency limit and default parameters.

`nightjar deploy` creates them for the workers of a work pool. `nightjar up` creates them for a process of its own.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy, VersionInfo
from prefect.client.schemas.responses import DeploymentResponse
from prefect.deployments.runner import RunnerDeployment
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.schedules import Schedule
from prefect.types.entrypoint import EntrypointType

import recsys_core
from flows.champion import promote, rollback
from flows.config import PipelineConfig
from flows.deployed import deployed_retrain
from recsys_core.errors import InputError, first_line, redacted, shown, shown_names
from tasks import ENVIRONMENT

ON_OVERRUN = {"skip": ConcurrencyLimitStrategy.CANCEL_NEW, "queue": ConcurrencyLimitStrategy.ENQUEUE}


class Change(NamedTuple):
    """A setting of a deployment and its values before and after `deploy`."""

    setting: str
    current: str
    new: str


def deployments_of(
    config: PipelineConfig, *, file: Path, overrides: Sequence[str], work_pool: str | None, is_active: bool = True
) -> tuple[RunnerDeployment, ...]:
    """Return the deployments nightly-retrain, promote and rollback of the pipeline. Each run reads `file` when it starts.

    Only nightly-retrain has a schedule and a limit of one run at a time, so a person can roll back while a run trains.

    Args:
        overrides: default of the field "Settings to override" in the forms.
        work_pool: work pool whose workers run the deployments; None: the process of `nightjar up` runs them.
        is_active: whether the schedule starts runs; false for a schedule that a person has paused.
    """
    schedule = config.schedule
    planned_schedule = Schedule(cron=schedule.cron, timezone=schedule.timezone, active=is_active) if schedule.cron else None
    limit = ConcurrencyLimitConfig(limit=1, collision_strategy=ON_OVERRUN[schedule.on_overrun])
    deployments = []
    for flow in (deployed_retrain, promote, rollback):
        deployment = flow.to_deployment(
            config.name,
            schedules=[planned_schedule] if planned_schedule is not None and flow is deployed_retrain else [],
            concurrency_limit=limit if flow is deployed_retrain else None,
            parameters={"pipeline": str(file.absolute()), "overrides": list(overrides)},
            tags=["nightjar", f"pipeline:{config.name}"],
            version=recsys_core.__version__,
            entrypoint_type=EntrypointType.MODULE_PATH,
            job_variables={"env": ENVIRONMENT} if work_pool else {},
        )
        assert isinstance(deployment, RunnerDeployment)
        deployment.work_pool_name = work_pool  # None removes the work pool of an existing deployment
        deployments.append(deployment)
    return tuple(deployments)


def read_deployment(
    client: SyncPrefectClient, name: str, *, flow_name: str = deployed_retrain.name
) -> DeploymentResponse | None:
    """Return a deployment of the pipeline `name`; None if it does not exist. Raise InputError if Prefect rejects the name."""
    if "/" in name or "%" in name:
        raise InputError(f"name: {shown(name)} contains / or %, which the name of a Prefect deployment may not contain")
    try:
        return client.read_deployment_by_name(f"{flow_name}/{name}")
    except ObjectNotFound:
        return None


def is_paused(deployment: DeploymentResponse | None, config: PipelineConfig) -> bool:
    """Return whether a person has paused the schedule that `config` describes."""
    schedules = [] if deployment is None else deployment.schedules
    return any(
        not schedule.active and getattr(schedule.schedule, "cron", None) == config.schedule.cron for schedule in schedules
    )


def changes(current: DeploymentResponse | None, new: RunnerDeployment) -> list[Change]:
    """Return the settings that differ; for a deployment that does not exist, all settings."""
    current_settings = {} if current is None else _settings(current)
    pairs = ((name, current_settings.get(name, "-"), value) for name, value in _settings(new).items())
    return [Change(name, before, after) for name, before, after in pairs if before != after]


def apply(deployment: RunnerDeployment) -> UUID:
    """Create the deployment, or update it; return its id."""
    # With version information Prefect does not look for a git repository in the current folder.
    deployment_id = deployment.apply(version_info=VersionInfo(type="prefect:simple", version=recsys_core.__version__))
    return UUID(str(deployment_id))


@contextmanager
def prefect_server() -> Iterator[SyncPrefectClient]:
    """Yield a client of the server in PREFECT_API_URL; raise InputError if it does not answer or is incompatible."""
    url = redacted(os.environ["PREFECT_API_URL"])
    try:
        with get_client(sync_client=True) as client:
            _check_version(client.api_version(), url=url)
            yield client
    except (httpx.HTTPError, PrefectHTTPStatusError, RuntimeError) as error:
        status = error.response.status_code if isinstance(error, httpx.HTTPStatusError) else None
        if status in (401, 403):
            raise InputError(
                f"the Prefect server at {url} rejects the request with HTTP status {status}; set PREFECT_API_AUTH_STRING or "
                "PREFECT_API_KEY to the secret of the server"
            ) from None
        cause = error.__cause__ or error
        problem = f"{type(cause).__name__}: {first_line(cause)}"
        raise InputError(
            redacted(f"the Prefect server at {url} does not work: {problem}; check the server and PREFECT_API_URL")
        ) from None


def _check_version(server_version: str, *, url: str) -> None:
    import prefect

    server_numbers, client_numbers = (version.split(".")[:2] for version in (server_version, prefect.__version__))
    is_older = [int(number) for number in server_numbers] < [int(number) for number in client_numbers]
    if server_numbers[0] != client_numbers[0] or is_older:
        raise InputError(
            f"the Prefect server at {url} has version {server_version}, but this installation of nightjar has Prefect "
            f"{prefect.__version__}, which needs a server of version {'.'.join(client_numbers)} or a later "
            f"{client_numbers[0]}.x; upgrade the server"
        )


def check_work_pool(client: SyncPrefectClient, name: str | None) -> str:
    """Return the name of an existing work pool, by default PREFECT_DEPLOYMENTS_DEFAULT_WORK_POOL_NAME; or raise InputError."""
    from prefect.settings import get_current_settings

    name = name or get_current_settings().deployments.default_work_pool_name
    work_pools = [work_pool.name for work_pool in client.read_work_pools()]
    if name in work_pools:
        return name
    problem = "--work-pool is missing" if name is None else f"--work-pool {name}: the Prefect server has no such work pool"
    raise InputError(
        f"{problem}; its work pools are {shown_names(work_pools) if work_pools else 'none'}; create one with: "
        f"prefect work-pool create {name or 'nightjar'} --type process"
    )


def _settings(deployment: RunnerDeployment | DeploymentResponse) -> dict[str, str]:
    """Return the settings of a deployment that `changes` compares, as text by name."""
    if isinstance(deployment, RunnerDeployment):
        limit = deployment.concurrency_limit
    else:
        limit = deployment.global_concurrency_limit.limit if deployment.global_concurrency_limit else None
    options = deployment.concurrency_options
    settings: dict[str, Any] = {
        "schedule": ", ".join(map(_describe_schedule, deployment.schedules or [])) or "none",
        "concurrent runs": f"{limit or 'any number'}" + (f", {options.collision_strategy.value}" if options else ""),
        "pipeline": deployment.parameters.get("pipeline"),
        "overrides": ", ".join(deployment.parameters.get("overrides") or []) or "none",
        "work pool": deployment.work_pool_name or "none",
        "entry point": deployment.entrypoint,
        "tags": ", ".join(sorted(deployment.tags)),
        "version": deployment.version,
    }
    return {name: str(value) for name, value in settings.items()}


def _describe_schedule(planned_schedule: Any) -> str:
    """Describe a schedule of a deployment: cron expression, time zone, and whether it is paused."""
    schedule = planned_schedule.schedule
    text = f"{schedule.cron} {schedule.timezone or 'UTC'}" if hasattr(schedule, "cron") else str(schedule)
    return text if planned_schedule.active is not False else f"{text}, paused"
