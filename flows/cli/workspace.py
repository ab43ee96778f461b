"""`nightjar history` and `nightjar clean`: the runs of a workspace, and their removal."""

import json
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from flows.cli.output import print_table
from flows.settings.pipeline import PipelineConfig
from recsys_core.errors import printable
from recsys_core.units import format_bytes, format_duration, format_gib

if TYPE_CHECKING:
    from flows.runs.run_history import PastRun
    from tasks.retention.clean import Removals

_COLOURS = {
    "Promoted": "green",
    "NotPromoted": "yellow",
    "NotEnoughData": "yellow",
    "Running": "",
    "DryRun": "",
    "StoppedEarly": "",
}
"""Colour by state; all other states are red."""


def as_json(runs: "Sequence[PastRun]", *, metric_name: str) -> str:
    """Return the line that --json prints: a list with one object per run, the newest first."""
    return json.dumps([past_run.as_json(metric_name=metric_name) for past_run in runs])


def print_history(runs: "Sequence[PastRun]", *, metric_name: str, console: Console) -> None:
    """Print one row per run, the newest first, then the reasons of runs and the messages of runs that were not promoted."""
    from flows.runs.run_history import STATE_NAMES, format_count, format_metric

    rows: list[list[str | Text]] = []
    for past_run in runs:
        record, figures = past_run.record, past_run.record.figures
        scores = (past_run.new_version_metric(metric_name), past_run.champion_metric(metric_name))
        rows.append(
            [
                past_run.run.run_id,
                Text(STATE_NAMES[record.state], _COLOURS.get(record.state, "red")),
                figures.version or "-",
                *map(format_metric, scores),
                *(format_count(count) for count in (figures.events, figures.users, figures.test_users, figures.items)),
                format_duration(record.seconds),
                format_bytes(past_run.disk_bytes),
            ]
        )
    count_titles = ["events", "users", "test users", "items"]
    titles = ["run (UTC)", "ended as", "version", metric_name, "champion", *count_titles, "duration", "disk"]
    print_table(titles, rows, console=console)
    runs_with_note = [past_run for past_run in runs if past_run.record.state != "Promoted" or past_run.record.options.reason]
    if runs_with_note:
        console.print()
    for past_run in runs_with_note:
        record = past_run.record
        reason = f"reason: {record.options.reason}" if record.options.reason else ""
        message = record.message if record.state != "Promoted" else ""
        note = "; ".join(filter(None, (reason, message))) or STATE_NAMES[record.state]
        console.print(f"{past_run.run.run_id}  {printable(note)}", markup=False, soft_wrap=True)


def clean_workspace(config: PipelineConfig, *, dry_run: bool) -> "Removals":
    """Remove files and versions that `config.retention` does not keep; with `dry_run`, only return the removals.

    Raises:
        InputError: another command is using the workspace.
        TrackingServerError: MLflow does not answer; nothing is removed.
    """
    from tasks.retention.clean import clean
    from tasks.runs.workspace import Workspace

    with nullcontext() if dry_run else Workspace(config.workspace).lock(run_id="clean"):
        return clean(config.workspace, config.retention, model_name=config.registry.model_name, dry_run=dry_run)


def print_removals(removals: "Removals", *, dry_run: bool, console: Console) -> None:
    """Print one row per run and version, and the total."""
    from tasks.registry.mlflow_client import RUN_ID_TAG

    run_rows = [
        [removal.run_id, "folder" if removal.action == "remove" else "all but reports"] for removal in removals.run_removals
    ]
    version_rows = [[version.tags[RUN_ID_TAG], f"{version.name} version {version.version}"] for version in removals.versions]
    if not run_rows and not version_rows:
        console.print("Nothing to remove.")
        return
    print_table(["run", "to remove" if dry_run else "removed"], run_rows + version_rows, console=console)
    summary = f"files of {len(run_rows)} runs and {len(version_rows)} model versions"
    if dry_run:
        console.print(f"{summary}; remove them with the same command without --dry-run", soft_wrap=True)
    else:
        console.print(f"removed {summary}: {format_gib(removals.freed_bytes, digits=3)}", soft_wrap=True)
