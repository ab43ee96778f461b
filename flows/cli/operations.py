"""Commands of the operator: installation, schedule, servers, releases, history and disk space."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from flows.cli import commands
from flows.cli.arguments import (
    ChangeReason,
    ConfigOptions,
    MlflowPort,
    Overrides,
    PrefectPort,
    command_line,
    takes_config,
    takes_config_and_json,
)
from recsys_core.errors import InputError

app = typer.Typer()
HELP_PANEL = "Operations"


@app.command(rich_help_panel=HELP_PANEL, epilog="Example: nightjar doctor nightly.yaml")
def doctor(
    config_path: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE", help="config file of an installation: its servers, schedule, disk and shared memory are checked too"
        ),
    ] = None,
    overrides: Overrides = None,
    folder: Annotated[Path, typer.Option(help="folder whose disk is checked if no file is given")] = Path(),
) -> None:
    """Check the hardware and the versions of the libraries; with a config file, the whole installation."""
    if config_path is None and overrides:
        raise InputError("--set replaces a setting of a config file, but no file is given; add FILE, e.g. nightly.yaml")
    options = None if config_path is None else ConfigOptions(config_path, tuple(overrides or ()))
    commands.workspace.doctor(options, folder=folder)


@app.command(rich_help_panel=HELP_PANEL, epilog="Example: nightjar releases")
@takes_config_and_json
def releases(options: ConfigOptions) -> None:
    """List the registered versions with alias, metrics of the recommendations, and run."""
    loaded_config = options.prepare()
    commands.registry.releases(loaded_config, as_json=options.as_json)


@app.command(rich_help_panel=HELP_PANEL, epilog="Example: nightjar compare --version 8 --with 7")
@takes_config_and_json
def compare(
    options: ConfigOptions,
    version: Annotated[str | None, typer.Option(help="number or alias of a version; by default the newest version")] = None,
    reference: Annotated[str, typer.Option("--with", help="number or alias of the version to compare it with")] = "champion",
    users: Annotated[int, typer.Option(min=1, help="number of users whose recommendations are compared")] = 1_000,
    k: Annotated[int, typer.Option("-k", min=1, help="number of items per user")] = 20,
) -> None:
    """Compare two versions: metrics and overlap of recommendations, and items recommended to many more or many fewer users."""
    commands.registry.compare(
        options.prepare(), version=version, reference=reference, num_users=users, k=k, as_json=options.as_json
    )


@app.command(rich_help_panel=HELP_PANEL, epilog='Example: nightjar promote --version 7 --reason "new prices"')
@takes_config
def promote(
    options: ConfigOptions,
    version: Annotated[int, typer.Option(min=1, help="number of the version, see nightjar releases")],
    reason: ChangeReason,
) -> None:
    """Make a registered version the champion if it passes the smoke test."""
    loaded_config = options.prepare()
    commands.registry.change_champion(loaded_config, "promote", {"version": version, "reason": reason})


@app.command(rich_help_panel=HELP_PANEL, epilog='Example: nightjar rollback --reason "recommends items that are sold out"')
@takes_config
def rollback(
    options: ConfigOptions,
    reason: ChangeReason,
    version: Annotated[
        int | None, typer.Option(min=1, help="a former champion; by default the newest former champion that loads")
    ] = None,
) -> None:
    """Give the alias champion back to a former champion."""
    loaded_config = options.prepare()
    commands.registry.change_champion(loaded_config, "rollback", {"version": version or 0, "reason": reason})


@app.command(rich_help_panel=HELP_PANEL, epilog="Example: nightjar refresh nightly.yaml")
@takes_config
def refresh(options: ConfigOptions) -> None:
    """Add new items to the champion and remove items that are gone, without a training."""
    loaded_config = options.prepare()  # sets environment variables that MLflow reads when commands.registry imports it
    commands.registry.change_champion(loaded_config, "refresh", {})


@app.command(rich_help_panel=HELP_PANEL, epilog="Example: nightjar push nightly.yaml --version 7")
@takes_config
def push(
    options: ConfigOptions,
    version: Annotated[int | None, typer.Option(min=1, help="number of the version; by default the champion")] = None,
) -> None:
    """Copy the items of a version into the vector stores of `delivery`, and switch the alias of each store to this version."""
    config = options.prepare().config
    commands.registry.push(config, version=version)


@app.command(
    rich_help_panel=HELP_PANEL,
    epilog='Example: nightjar deploy --cron "15 2 * * *" --timezone Europe/Berlin --work-pool nightjar',
)
@takes_config
def deploy(
    options: ConfigOptions,
    cron: Annotated[str | None, typer.Option(help="planned starts as a cron expression, instead of schedule.cron")] = None,
    timezone: Annotated[str | None, typer.Option(help="time zone of the planned starts, instead of schedule.timezone")] = None,
    work_pool: Annotated[str | None, typer.Option(metavar="NAME", help="work pool whose workers run the pipeline")] = None,
    automations: Annotated[
        bool, typer.Option("--automations", help="also create alerts, which the Prefect block nightjar-alerts delivers")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run/--apply", help="only print the changes")] = False,
) -> None:
    """Create or update the deployments of the pipeline in the Prefect server of PREFECT_API_URL."""
    loaded_config = options.with_settings({"schedule.cron": cron, "schedule.timezone": timezone}).read()
    # --cron and --timezone become the schedule of the deployment. The form of a manual run does not show them as overrides.
    loaded_config = replace(loaded_config, overrides=options.overrides)
    if not os.environ.get("PREFECT_API_URL"):
        raise InputError(
            "PREFECT_API_URL is not set; set it to the API of your Prefect server, e.g. http://127.0.0.1:4200/api, or start "
            f"servers and schedule on this machine with: {command_line('up', loaded_config)}"
        )
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
    os.environ.setdefault("PREFECT_CLIENT_MAX_RETRIES", "2")  # a user waits for the answer
    commands.deploy.deploy_pipeline(loaded_config, work_pool_name=work_pool, with_automations=automations, dry_run=dry_run)


@app.command(rich_help_panel=HELP_PANEL, epilog="Example: nightjar clean nightly.yaml --dry-run")
@takes_config
def clean(
    options: ConfigOptions,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="list the files and versions, but do not remove them")] = False,
) -> None:
    """Remove files of old runs and old model versions that `retention` does not keep. Each run does the same at its end."""
    config = options.prepare().config
    commands.registry.print_removals(commands.registry.clean_workspace(config, dry_run=dry_run), dry_run=dry_run)


@app.command(rich_help_panel=HELP_PANEL, epilog="Example: nightjar history --last 30")
@takes_config_and_json
def history(
    options: ConfigOptions,
    last: Annotated[int, typer.Option(min=1, help="number of runs to list")] = 20,
) -> None:
    """List the last runs: how each ended, metrics of the new version, data sizes, duration and disk space."""
    commands.workspace.show_history(options.read(), num_runs=last, as_json=options.as_json)


@app.command(rich_help_panel=HELP_PANEL, epilog="Example: nightjar ui --mlflow-port 5001")
@takes_config
def ui(
    options: ConfigOptions,
    prefect_port: PrefectPort = 4200,
    mlflow_port: MlflowPort = 5000,
) -> None:
    """Serve the Prefect and MLflow UIs on this machine until Ctrl-C."""
    config = options.prepare().config
    commands.ui.serve(config, prefect_port=prefect_port, mlflow_port=mlflow_port)


@app.command(
    rich_help_panel=HELP_PANEL,
    epilog='Example: nightjar up --set "schedule.cron=15 2 * * *" --set schedule.timezone=Europe/Berlin',
)
@takes_config
def up(
    options: ConfigOptions,
    prefect_port: PrefectPort = 4200,
    mlflow_port: MlflowPort = 5000,
) -> None:
    """Run the pipeline on its schedule, and serve the Prefect and MLflow UIs on this machine, until Ctrl-C or SIGTERM."""
    loaded_config = options.prepare()
    commands.ui.up(loaded_config, prefect_port=prefect_port, mlflow_port=mlflow_port)
