"""Commands on files, without servers: `init`, `demo`, `validate`, `doctor` and `history`."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.text import Text

from flows import runs, settings
from flows.cli import output
from flows.cli.arguments import ConfigOptions, InputOptions, command_line
from flows.settings.config_file import LoadedConfig
from flows.settings.template import require_new_file, starter_config, to_commented_yaml, write_demo
from recsys_core.errors import InputError, printable
from recsys_core.units import format_bytes, format_duration, format_metric

if TYPE_CHECKING:
    from flows.runs.run_history import PastRun

FINDING_STYLES = {"ok": "green", "problem": "red", "not used": "dim"}
STATE_COLOURS = {
    "Promoted": "green",
    "NotPromoted": "yellow",
    "NotEnoughData": "yellow",
    "Running": "",
    "DryRun": "",
    "StoppedEarly": "",
}
"""Colour of each state. States that are not listed are red."""


def init(config_path: Path, *, inputs: InputOptions, every_setting: bool) -> None:
    """Write a config with guesses for the given files."""
    require_new_file(config_path)
    if inputs.log is None and any((inputs.test, inputs.user_column, inputs.item_column, inputs.time_column)):
        raise InputError("--test, --user-column, --item-column and --time-column are about the log; add --log")
    config, note_by_setting, next_step = starter_config(), dict[str, str](), "set your paths and columns"
    if inputs != InputOptions():
        guesses = settings.column_guesses
        config, note_by_setting = guesses.guess_config(
            config, guesses.InitInputs(**asdict(inputs)), config_folder=config_path.parent
        )
        unknown_settings = [setting for setting, note in note_by_setting.items() if note.startswith(guesses.FILL_IN)]
        next_step = f"fill in {' and '.join(unknown_settings)}" if unknown_settings else "check the guessed columns"
    config_path.write_text(
        to_commented_yaml(config, note_by_setting=note_by_setting, every_setting=every_setting), encoding="utf-8"
    )
    output.print_line(f"wrote {config_path}; {next_step}, then: nightjar validate {shlex.quote(str(config_path))}")


def demo(workspace: Path) -> Path:
    """Generate the data and the config of the demo, unless they exist; return the path of the config."""
    return write_demo(workspace)


def validate(loaded_config: LoadedConfig) -> None:
    """Check the input files and print one line about each input."""
    with output.printed_log():
        summary_by_input = runs.before_run.check_inputs(loaded_config.config)
    output.print_labelled(summary_by_input)
    output.print_line(f"{loaded_config.path}: OK. Run it with: {command_line('run', loaded_config)}")


def doctor(options: ConfigOptions | None, *, folder: Path) -> None:
    """Print the results of all checks; exit with code 1 if there is a problem.

    Args:
        options: config of the installation to check. None: only the libraries and the hardware are checked.
        folder: folder whose disk is checked if there is no config.
    """
    from recsys_core.preflight import check_environment  # imports NumPy

    config = None if options is None else options.read().config
    text_by_label, problems = check_environment(folder if config is None else config.workspace)
    output.print_labelled(text_by_label)
    for problem in problems:
        output.print_line(f"problem: {problem}", style="red")
    num_problems = len(problems)
    if config is not None:
        from flows.doctor.installation import examine  # imports MLflow

        findings = examine(config)
        output.stdout.print()
        output.print_labelled(
            {subject: finding.text for subject, finding in findings.items()},
            status_by_label={
                subject: f"[{FINDING_STYLES[finding.status]}]{finding.status:<8}[/]" for subject, finding in findings.items()
            },
        )
        num_problems += sum(finding.status == "problem" for finding in findings.values())
    if num_problems:
        output.print_line(f"{num_problems} {'problem' if num_problems == 1 else 'problems'} found.", style="red")
        raise typer.Exit(1)
    output.print_line("No problems found.")


def show_history(loaded_config: LoadedConfig, *, num_runs: int, as_json: bool) -> None:
    """Print the last runs, the newest first."""
    workspace, metric_name = loaded_config.config.workspace, loaded_config.config.registry.metric
    past_runs = runs.run_history.run_history(workspace, max_runs=num_runs)
    if as_json:
        output.print_json(json.dumps([past_run.as_json(metric_name=metric_name) for past_run in past_runs]))
    elif past_runs:
        print_history(past_runs, metric_name=metric_name)
        output.print_labelled({"page": str(workspace / "index.html")})
    else:
        output.print_line(f"no run in {workspace} yet; start one with: {command_line('run', loaded_config)}")


def print_history(past_runs: "Sequence[PastRun]", *, metric_name: str) -> None:
    """Print one row per run, then a note for each run that has a reason or was not promoted."""
    state_names, format_count = runs.run_history.STATE_NAMES, runs.run_history.format_count
    rows: list[list[str | Text]] = []
    for past_run in past_runs:
        record, figures = past_run.record, past_run.record.figures
        metric_values = (past_run.new_version_metric(metric_name), past_run.champion_metric(metric_name))
        rows.append(
            [
                past_run.run.run_id,
                Text(state_names[record.state], STATE_COLOURS.get(record.state, "red")),
                figures.version or "-",
                *map(format_metric, metric_values),
                *map(format_count, (figures.events, figures.users, figures.test_users, figures.items)),
                format_duration(record.seconds),
                format_bytes(past_run.disk_bytes),
            ]
        )
    count_titles = ["events", "users", "test users", "items"]
    column_titles = ["run (UTC)", "ended as", "version", metric_name, "champion", *count_titles, "duration", "disk"]
    output.print_table(column_titles, rows)
    runs_with_note = [
        past_run for past_run in past_runs if past_run.record.state != "Promoted" or past_run.record.options.reason
    ]
    if runs_with_note:
        output.stdout.print()
    for past_run in runs_with_note:
        record = past_run.record
        reason = f"reason: {record.options.reason}" if record.options.reason else ""
        message = record.message if record.state != "Promoted" else ""
        note = "; ".join(filter(None, (reason, message))) or state_names[record.state]
        output.print_line(f"{past_run.run.run_id}  {printable(note)}")
