"""A tuning as the command line starts it: the flow, its outcome as one object, its table."""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.cli import output
from flows.cli.interruption import interruptible
from flows.cli.runner import with_traceback_kept
from flows.config import PipelineConfig
from flows.prefect_server import EmbeddedServer, prefect_session
from recsys_core.errors import InputError, NightjarError, StageError
from tasks.run import workspace_lock
from tasks.tuning.config import label_of

if TYPE_CHECKING:
    from tasks.tuning.study import Study


def check_tunable(config: PipelineConfig, *, file: Path) -> None:
    """InputError unless the config says what to vary and how to compare."""
    if config.tuning is None:
        raise InputError(
            f"{file}: has no tuning; say what to vary, e.g. "
            "tuning: {ranges: {model.temperature: {low: 0.03, high: 0.3, log: true}}}"
        )
    if config.training.validation is None:
        raise InputError(
            f"{file}: training.validation is null, but trials are compared by it; leave it out for ndcg@10 after each epoch"
        )


def run_study(config: PipelineConfig, *, server: EmbeddedServer | None, command: str) -> "Study":
    """Runs the flow to its end. Raises what it raises, and StageError where no trial came to its end.

    server, command: as in flows.cli.runner.
    """
    folder = config.workspace / "tuning"
    with (
        workspace_lock(config.workspace, run_id="tuning"),
        output.stage_lines(),
        interruptible(lambda: f"resume with: {command}") as interruption,
    ):
        try:
            with prefect_session(server, log=config.workspace / "prefect.log"):
                from flows.tuning import tune_settings

                study: Study = tune_settings.with_options(on_running=[interruption.note])(config)
        except NightjarError:
            raise
        except Exception as error:  # whatever a library throws: the person sees one line, the traceback is kept
            raise with_traceback_kept(error, folder=folder) from error
    tried = study.tried
    if study.best is None:
        why = f"; trial {tried[-1].number} {tried[-1].ending}: {tried[-1].reason}" if tried else ""
        raise StageError(f"none of {len(tried)} trials came to its end{why}\nall of them: {study.folder}")
    return study


def as_json(study: "Study") -> str:
    """The line that --json prints."""
    from tasks.tuning.study import best_first

    trials = [trial.model_dump(mode="json") for trial in best_first(study.tried)]
    return json.dumps({"study": study.name, "folder": str(study.folder), "metric": study.metric, "trials": trials})


def print_study(study: "Study", *, file: Path) -> None:
    """The trials, best first, and the best settings: as YAML, and as a command."""
    from tasks.tuning.study import best_first

    console, best = output.out, study.best
    assert best is not None
    rows = [
        [
            str(trial.number),
            "-" if trial.value is None else f"{trial.value:.4f}",
            str(max(trial.epochs, default=0)),
            f"{trial.seconds:,.0f}",
            *(shortened(trial.settings[name]) if name in trial.settings else "-" for name in best.settings),
            trial.ending,
        ]
        for trial in best_first(study.tried)
    ]
    console.print(f"\n[bold]Trials[/], best first: {study.metric} on the validation split")
    output.print_table(["trial", study.metric, "epochs", "seconds", *best.settings, "ended"], rows, console=console)
    console.print("\n[bold]The best settings[/], for your file")
    console.print(study.best_file.read_text(encoding="utf-8"), markup=False, soft_wrap=True)
    facts = {
        "saved": str(study.best_file),
        "picture": str(study.history_file),
        "run it": f"nightjar run {file} {as_overrides(best.settings)}",
        "more": f"nightjar tune {file} --trials {2 * len(study.tried)}",
    }
    output.print_facts(facts, console=console)


def as_overrides(settings: Mapping[str, Any]) -> str:
    """The settings as --set takes them, quoted for a shell.

    >>> as_overrides({"loss.kind": "bce", "model.query.layers": [64, 32]})
    "--set loss.kind=bce --set 'model.query.layers=[64, 32]'"
    """
    return " ".join(f"--set {shlex.quote(f'{name}={label_of(value)}')}" for name, value in settings.items())


def shortened(value: object) -> str:
    """A setting's value for a table.

    >>> shortened(0.0123456), shortened("softmax"), shortened([64, 32])
    ('0.01235', 'softmax', '[64, 32]')
    """
    return f"{value:.4g}" if isinstance(value, float) else label_of(value)
