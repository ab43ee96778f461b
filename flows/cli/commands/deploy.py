"""`nightjar deploy`: the deployments of a pipeline in the user's Prefect server, for the workers of a work pool."""

from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import VersionInfo
from prefect.client.schemas.responses import DeploymentResponse
from prefect.deployments.runner import RunnerDeployment
from prefect.settings import get_current_settings

import recsys_core
from flows.cli import output
from flows.prefect_runs import prefect_client
from flows.scheduled import automations, deployments
from flows.settings.config_file import LoadedConfig
from recsys_core.errors import InputError, shown_names


def deploy_pipeline(
    loaded_config: LoadedConfig, *, work_pool_name: str | None, with_automations: bool = False, dry_run: bool
) -> None:
    """Print the changes of the deployments, and apply the changes unless `dry_run` is set.

    Args:
        with_automations: also create or update the automations that send alerts.

    Raises:
        InputError: the server, the work pool or the alert block cannot be used; nothing is created.
    """
    config = loaded_config.config
    automation_names: list[str] = []
    with prefect_client() as client:
        work_pool_name = _choose_work_pool(client, work_pool_name)
        if with_automations:
            automations.require_alert_block(client)
        new_deployments = deployments.deployments_of(
            loaded_config, work_pool_name=work_pool_name, paused_flows=deployments.paused_flows(client, config)
        )
        text_by_label: dict[str, str] = {}
        change_rows: list[list[str]] = []
        for deployment in new_deployments:
            current_deployment = deployments.read_deployment(client, config.name, flow_name=str(deployment.flow_name))
            changes = _changed_settings(current_deployment, deployment)
            change_rows += [[str(deployment.flow_name), *change] for change in changes]
            outcome = "created" if current_deployment is None else "updated" if changes else "unchanged"
            text_by_label[deployment.full_name] = f"would be {outcome}" if dry_run else outcome
        if change_rows:
            output.print_table(["deployment", "setting", "current", "new"], change_rows, left_columns=range(4))
        if not dry_run:
            deployment_id, *_ = [_apply_deployment(deployment) for deployment in new_deployments]
            if with_automations:
                automation_names = automations.create_automations(client, config, deployment_id=deployment_id)
    next_start = config.schedule.next_start(datetime.now(UTC))
    text_by_label |= {
        "next start": "by hand only; set schedule.cron or --cron" if next_start is None else f"{next_start:%Y-%m-%d %H:%M %Z}",
        "worker": f"prefect worker start --pool {work_pool_name}",
        "start by hand": f"prefect deployment run {new_deployments[0].full_name}",
    }
    if next_refresh := config.schedule.next_start(datetime.now(UTC), flow_name="refresh"):
        text_by_label["next refresh"] = f"{next_refresh:%Y-%m-%d %H:%M %Z}"
    if with_automations:
        text_by_label["automations"] = ", ".join(automation_names) or "would be created or updated"
    output.print_labelled(text_by_label)


def _choose_work_pool(client: SyncPrefectClient, requested_name: str | None) -> str:
    """Return `requested_name`; if it is None, return the value of PREFECT_DEPLOYMENTS_DEFAULT_WORK_POOL_NAME.

    Raise InputError if the server has no work pool of this name.
    """
    pool_name = requested_name or get_current_settings().deployments.default_work_pool_name
    existing_names = [work_pool.name for work_pool in client.read_work_pools()]
    if pool_name in existing_names:
        return pool_name
    problem = (
        "--work-pool is missing" if pool_name is None else f"--work-pool {pool_name}: the Prefect server has no such work pool"
    )
    raise InputError(
        f"{problem}; the server's work pools are {shown_names(existing_names) if existing_names else 'none'}; create one with: "
        f"prefect work-pool create {pool_name or 'nightjar'} --type process"
    )


def _changed_settings(current_deployment: DeploymentResponse | None, new_deployment: RunnerDeployment) -> list[list[str]]:
    """Return [setting, current value, new value] for each setting that differs; a new deployment differs in all settings."""
    current_settings = {} if current_deployment is None else _deployment_settings(current_deployment)
    return [
        [setting, current_settings.get(setting, "-"), new_value]
        for setting, new_value in _deployment_settings(new_deployment).items()
        if current_settings.get(setting) != new_value
    ]


def _deployment_settings(deployment: RunnerDeployment | DeploymentResponse) -> dict[str, str]:
    """Return the settings that `_changed_settings` compares, as text by the name of the setting."""
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


def _apply_deployment(deployment: RunnerDeployment) -> UUID:
    """Create or update the deployment; return its id."""
    # With explicit version information, Prefect does not look for a git repository in the current folder.
    deployment_id = deployment.apply(version_info=VersionInfo(type="prefect:simple", version=recsys_core.__version__))
    return UUID(str(deployment_id))
