"""Commands of the operator: installation, schedule, servers, releases, history and disk space."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from flows.cli import output
from flows.cli.arguments import AsJson, ConfigOptions, Overrides, takes_config
from recsys_core.imports import fast_imports

if TYPE_CHECKING:
    from flows.settings.config_file import LoadedConfig

commands = typer.Typer()
HELP_PANEL = "Operations"


@commands.command(rich_help_panel=HELP_PANEL, epilog="Example: nightjar doctor nightly.yaml")
def doctor(
    config_path: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="config file: its servers, schedule, disk and shared memory are checked too"),
    ] = None,
    overrides: Overrides = None,
    folder: Annotated[Path, typer.Option(help="folder whose disk is checked if no file is given")] = Path(),
) -> None:
    """Check the versions of the libraries and the hardware; with a config file, the whole installation."""
    config = None
    if config_path is not None:
        config = ConfigOptions(config_path, tuple(overrides or ())).read().config
    from recsys_core.preflight import check_environment

    facts, problems = check_environment(folder if config is None else config.workspace)
    output.print_facts(facts, console=output.stdout)
    for problem in problems:
        output.stdout.print(f"problem: {output.printable_lines(problem)}", style="red", markup=False, soft_wrap=True)
    num_problems = len(problems)
    if config is not None:
        from flows.doctor.installation import examine

        findings = examine(config)
        output.print_findings(findings, console=output.stdout)
        num_problems += sum(finding.status == "problem" for finding in findings.values())
    if num_problems:
        output.stdout.print(f"{num_problems} {'problem' if num_problems == 1 else 'problems'} found.", style="red")
        raise typer.Exit(1)
    output.stdout.print("No problems found.")


@commands.command(rich_help_panel=HELP_PANEL, epilog="Example: nightjar releases")
@takes_config
def releases(options: ConfigOptions, as_json: AsJson = False) -> None:
    """List the registered versions with alias, served metrics and run."""
    import json

    config = options.prepare().config
    with fast_imports():
        from tasks.registry.mlflow_client import call_with_deadline, connect
        from tasks.registry.releases import list_releases

    client = connect(config.workspace)
    registered_versions = call_with_deadline(lambda: list_releases(client, config.registry.model_name), uri=client.tracking_uri)
    if as_json:
        sys.stdout.write(json.dumps(registered_versions) + "\n")
    elif registered_versions:
        output.print_releases(registered_versions, console=output.stdout)
    else:
        output.stdout.print(
            f"no version of {config.registry.model_name} yet; register one with: nightjar run {options.path}", soft_wrap=True
        )


Reason = Annotated[str, typer.Option(metavar="TEXT", help="why the champion changes; a tag of both versions")]


@commands.command(rich_help_panel=HELP_PANEL, epilog='Example: nightjar promote --version 7 --reason "new prices"')
@takes_config
def promote(
    options: ConfigOptions,
    version: Annotated[int, typer.Option(min=1, help="number of the version, see nightjar releases")],
    reason: Reason,
) -> None:
    """Make a registered version the champion if it passes the smoke test."""
    _choose_champion("promote", options.prepare(), {"version": version, "reason": reason})


@commands.command(rich_help_panel=HELP_PANEL, epilog='Example: nightjar rollback --reason "recommends items that are sold out"')
@takes_config
def rollback(
    options: ConfigOptions,
    reason: Reason,
    version: Annotated[
        int | None, typer.Option(min=1, help="a former champion; by default the newest former champion that loads")
    ] = None,
) -> None:
    """Give the alias champion back to a former champion."""
    _choose_champion("rollback", options.prepare(), {"version": version or 0, "reason": reason})


def _choose_champion(command: Literal["promote", "rollback"], loaded: "LoadedConfig", parameters: dict[str, object]) -> None:
    from flows.cli.runner import choose_champion

    choose_champion(loaded, command, parameters=parameters)


@commands.command(
    rich_help_panel=HELP_PANEL,
    epilog='Example: nightjar deploy --cron "15 2 * * *" --timezone Europe/Berlin --work-pool nightjar',
)
@takes_config
def deploy(
    options: ConfigOptions,
    cron: Annotated[str | None, typer.Option(help="planned starts, instead of schedule.cron")] = None,
    timezone: Annotated[str | None, typer.Option(help="time zone of the planned starts, instead of schedule.timezone")] = None,
    work_pool: Annotated[str | None, typer.Option(metavar="NAME", help="work pool whose workers run the pipeline")] = None,
    automations: Annotated[
        bool, typer.Option("--automations", help="also create alerts, which the Prefect block nightjar-alerts delivers")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run/--apply", help="only print the changes")] = False,
) -> None:
    """Create or update the deployments of the pipeline in the Prefect server of PREFECT_API_URL."""
    import json

    from flows.settings.config_file import LoadedConfig, load_config

    schedule_options = {"schedule.cron": cron, "schedule.timezone": timezone}
    schedule_overrides = [f"{setting}={json.dumps(value)}" for setting, value in schedule_options.items() if value is not None]
    # Runs read the schedule from the deployment, so these overrides are not in the form.
    config = load_config(options.path, [*options.overrides, *schedule_overrides])
    loaded = LoadedConfig(config, options.path, options.overrides)
    from flows.cli.deploy import deploy_pipeline

    deploy_pipeline(
        loaded,
        work_pool_name=work_pool,
        with_automations=automations,
        dry_run=dry_run,
    )


@commands.command(rich_help_panel=HELP_PANEL, epilog="Example: nightjar clean nightly.yaml --dry-run")
@takes_config
def clean(
    options: ConfigOptions,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="list the removals without removing anything")] = False,
) -> None:
    """Remove files of old runs and old model versions that `retention` does not keep. Each run does the same at its end."""
    config = options.prepare().config
    from flows.cli.workspace import clean_workspace, print_removals

    print_removals(clean_workspace(config, dry_run=dry_run), dry_run=dry_run, console=output.stdout)


@commands.command(rich_help_panel=HELP_PANEL, epilog="Example: nightjar history --last 30")
@takes_config
def history(
    options: ConfigOptions,
    last: Annotated[int, typer.Option(min=1, help="number of runs to list")] = 20,
    as_json: AsJson = False,
) -> None:
    """List the last runs: how each ended, served metrics, data sizes, duration and disk space."""
    from flows.cli.workspace import as_json as history_as_json
    from flows.cli.workspace import print_history
    from flows.runs.run_history import run_history

    config = options.read().config
    runs, metric_name = run_history(config.workspace, max_runs=last), config.registry.metric
    if as_json:
        sys.stdout.write(history_as_json(runs, metric_name=metric_name) + "\n")
    elif runs:
        print_history(runs, metric_name=metric_name, console=output.stdout)
        output.print_facts({"page": str(config.workspace / "index.html")}, console=output.stdout)
    else:
        output.stdout.print(f"no run in {config.workspace} yet; start one with: nightjar run {options.path}", soft_wrap=True)


@commands.command(rich_help_panel=HELP_PANEL, epilog="Example: nightjar ui --mlflow-port 5001")
@takes_config
def ui(
    options: ConfigOptions,
    prefect_port: Annotated[int, typer.Option(help="port of the Prefect UI")] = 4200,
    mlflow_port: Annotated[int, typer.Option(help="port of the MLflow UI")] = 5000,
) -> None:
    """Serve the Prefect and MLflow UIs on this machine until Ctrl-C."""
    config = options.prepare().config
    from flows.cli.ui import serve

    serve(config, prefect_port=prefect_port, mlflow_port=mlflow_port)


@commands.command(
    rich_help_panel=HELP_PANEL,
    epilog='Example: nightjar up --set "schedule.cron=15 2 * * *" --set schedule.timezone=Europe/Berlin',
)
@takes_config
def up(
    options: ConfigOptions,
    prefect_port: Annotated[int, typer.Option(help="port of the Prefect UI")] = 4200,
    mlflow_port: Annotated[int, typer.Option(help="port of the MLflow UI")] = 5000,
) -> None:
    """Run the pipeline as its schedule plans, and serve the Prefect and MLflow UIs on this machine, until Ctrl-C or SIGTERM."""
    loaded = options.prepare()
    from flows.cli import ui

    ui.up(loaded, prefect_port=prefect_port, mlflow_port=mlflow_port)
