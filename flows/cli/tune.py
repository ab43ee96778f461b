"""`nightjar tune`: run the tuning flow and print its trials."""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.cli import output
from flows.cli.arguments import ConfigOptions
from flows.cli.runner import Command, flow_session, format_command
from flows.runs.before_run import check_inputs
from flows.servers.prefect_server import PrefectServer
from flows.settings.config_file import LoadedConfig
from flows.settings.environment import prepare_environment
from recsys_core.errors import InputError, StageError
from tasks.tuning.config import label_of, short_label

if TYPE_CHECKING:
    from flows.tuning import StudyResult


def check_tunable(loaded: LoadedConfig) -> None:
    """Raise InputError unless the config has ranges to search and a validation metric to compare trials by."""
    if loaded.config.tuning is None:
        raise InputError(
            f"{loaded.path}: tuning is not set; name the settings to vary, e.g. "
            "tuning: {ranges: {model.temperature: {low: 0.03, high: 0.3, log: true}}}"
        )
    if loaded.config.training.validation is None:
        raise InputError(
            f"{loaded.path}: training.validation is null, but trials are compared by its metric; leave the "
            "setting out to use ndcg@10"
        )


def run_study(options: ConfigOptions, server: PrefectServer | None, *, trials: int | None) -> "StudyResult":
    """Run the tuning flow to its end; raise StageError if no trial is complete. `trials` replaces tuning.trials."""
    loaded = options.read()
    check_tunable(loaded)
    config = loaded.config
    check_inputs(config)
    if trials is not None and config.tuning is not None:
        config = config.model_copy(update={"tuning": config.tuning.model_copy(update={"trials": trials})})
    prepare_environment(config.workspace)
    words = [] if trials is None else ["--trials", str(trials)]
    command = Command(config, server, command_line=format_command("tune", loaded, words))

    def load_flow() -> Any:
        from flows.tuning import tune_settings

        return tune_settings

    folder, how_to_resume = config.workspace / "tuning", f"resume with: {command.command_line}"
    with flow_session(load_flow, command, run_id="tuning", folder=folder, how_to_resume=lambda: how_to_resume) as tune:
        study: StudyResult = tune(config)
    if study.best_trial is None:
        last_trial = f"; trial {study.trials[-1].number} failed: {study.trials[-1].reason}" if study.trials else ""
        raise StageError(f"none of {len(study.trials)} trials is complete{last_trial}\nthe trials are in {study.folder}")
    return study


def as_json(study: "StudyResult") -> str:
    """Return the line that --json prints."""
    trials = [trial.model_dump(mode="json") for trial in study.trials]
    return json.dumps({"study": study.folder.name, "folder": str(study.folder), "metric": study.metric, "trials": trials})


def print_study(study: "StudyResult", *, config_path: Path) -> None:
    """Print the trials, the best first, and the best settings as YAML and as a command."""
    console, best_trial = output.stdout, study.best_trial
    assert best_trial is not None
    rows = [
        [
            str(trial.number),
            "-" if trial.value is None else f"{trial.value:.4f}",
            str(max(trial.epochs, default=0)),
            f"{trial.seconds:,.0f}",
            *(short_label(trial.settings[setting]) if setting in trial.settings else "-" for setting in best_trial.settings),
            trial.ending,
        ]
        for trial in study.trials
    ]
    console.print(f"\n[bold]Trials[/], the best first: {study.metric} on the validation split")
    output.print_table(["trial", study.metric, "epochs", "seconds", *best_trial.settings, "ended"], rows, console=console)
    console.print("\n[bold]The best settings[/], for your file")
    console.print(study.best_file.read_text(encoding="utf-8"), markup=False, soft_wrap=True)
    facts = {
        "saved": str(study.best_file),
        "plot": str(study.history_file),
        "run": f"nightjar run {config_path} {as_overrides(best_trial.settings)}",
        "continue": f"nightjar tune {config_path} --trials {2 * len(study.trials)}",
    }
    output.print_facts(facts, console=console)


def as_overrides(settings: Mapping[str, Any]) -> str:
    """Format settings as --set options, quoted for a shell.

    >>> as_overrides({"loss.kind": "bce", "model.query.layers": [64, 32]})
    "--set loss.kind=bce --set 'model.query.layers=[64, 32]'"
    """
    return " ".join(f"--set {shlex.quote(f'{setting}={label_of(value)}')}" for setting, value in settings.items())
