"""`nightjar history`: the last runs as a table, or as JSON."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from flows.cli.output import print_table
from recsys_core.units import format_bytes, format_duration

if TYPE_CHECKING:
    from flows.history import PastRun

_COLOURS = {"Promoted": "green", "NotPromoted": "yellow", "Running": "", "DryRun": "", "StoppedEarly": ""}
"""Colour by state; all other states are red."""


def as_json(runs: "Sequence[PastRun]", *, metric_name: str) -> str:
    """Return the line that --json prints: a list with one object per run, the newest first."""
    return json.dumps([past_run.as_json(metric_name=metric_name) for past_run in runs])


def print_history(runs: "Sequence[PastRun]", *, metric_name: str, console: Console) -> None:
    """Print one row per run, the newest first, then the reasons of runs and the messages of runs that were not promoted."""
    from flows.history import STATE_NAMES, format_count

    rows: list[list[str | Text]] = []
    for past_run in runs:
        record, figures = past_run.record, past_run.record.figures
        scores = (past_run.new_version_metric(metric_name), past_run.champion_metric(metric_name))
        rows.append(
            [
                past_run.run.run_id,
                Text(STATE_NAMES[record.state], _COLOURS.get(record.state, "red")),
                figures.version or "-",
                *("-" if score is None else f"{score:.4f}" for score in scores),
                *(format_count(count) for count in (figures.events, figures.users, figures.items)),
                format_duration(record.seconds),
                format_bytes(past_run.disk_bytes),
            ]
        )
    titles = ["run (UTC)", "ended as", "version", metric_name, "champion", "events", "users", "items", "duration", "disk"]
    print_table(titles, rows, console=console)
    runs_with_note = [past_run for past_run in runs if past_run.record.state != "Promoted" or past_run.record.options.reason]
    if runs_with_note:
        console.print()
    for past_run in runs_with_note:
        record = past_run.record
        reason = f"reason: {record.options.reason}" if record.options.reason else ""
        message = record.message if record.state != "Promoted" else ""
        note = "; ".join(filter(None, (reason, message))) or STATE_NAMES[record.state]
        console.print(f"{past_run.run.run_id}  {note}", markup=False, soft_wrap=True)
