"""`nightjar deploy`: the deployments of a pipeline in the user's Prefect server, for the workers of a work pool."""

from datetime import UTC, datetime

from flows.cli import output
from flows.prefect_runs import prefect_client
from flows.scheduled import automations, deployments
from flows.settings.config_file import LoadedConfig


def deploy_pipeline(loaded: LoadedConfig, *, work_pool_name: str | None, with_automations: bool = False, dry_run: bool) -> None:
    """Print the changes of the deployments, and apply the changes unless `dry_run` is set.

    Args:
        with_automations: also create or update the automations that send alerts.

    Raises:
        InputError: the server, the work pool or the alert block cannot be used; nothing is created.
    """
    config = loaded.config
    automation_names: list[str] = []
    with prefect_client() as client:
        work_pool_name = deployments.choose_work_pool(client, work_pool_name)
        if with_automations:
            automations.require_alert_block(client)
        new_deployments = deployments.deployments_of(
            loaded, work_pool_name=work_pool_name, paused_flows=deployments.paused_flows(client, config)
        )
        text_by_label: dict[str, str] = {}
        rows: list[list[str]] = []
        for deployment in new_deployments:
            current_deployment = deployments.read_deployment(client, config.name, flow_name=str(deployment.flow_name))
            changes = deployments.changed_settings(current_deployment, deployment)
            rows += [[str(deployment.flow_name), *change] for change in changes]
            outcome = "created" if current_deployment is None else "updated" if changes else "unchanged"
            text_by_label[deployment.full_name] = f"would be {outcome}" if dry_run else outcome
        if rows:
            output.print_table(["deployment", "setting", "current", "new"], rows, left_columns=range(4))
        if not dry_run:
            deployment_id, *_ = [deployments.apply_deployment(deployment) for deployment in new_deployments]
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
