"""A run as the command line starts it: the flow, its outcome as one object, its tables."""

import json
import math
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.cli import output
from flows.cli.interruption import interruptible
from flows.config import PipelineConfig
from flows.prefect_server import EmbeddedServer, prefect_session
from recsys_core.disk import explain_disk_full
from recsys_core.errors import InputError, NightjarError, StageError, TrackingServerError, redacted
from recsys_core.evaluation.report import metric_table
from recsys_core.manifests import (
    EvaluationManifest,
    Manifest,
    RegistrationManifest,
    TrainManifest,
    load_manifest,
    require_own,
)
from tasks.run import STAGES, Run, StageName, new_run_id, workspace_lock


@dataclass(frozen=True)
class Outcome:
    """What a run left behind, by stage."""

    run: Run
    stages: dict[StageName, Manifest]

    @property
    def registration(self) -> RegistrationManifest | None:
        """The version, where the run came that far."""
        found = self.stages.get("register")
        return found if isinstance(found, RegistrationManifest) else None

    @property
    def metrics(self) -> dict[str, float]:
        """Exact metrics, and the served ones of the new version and the champion."""
        found = self.stages.get("evaluate")
        exact = found.metrics if isinstance(found, EvaluationManifest) else {}
        return exact | (self.registration.metrics if self.registration else {})

    def as_json(self) -> str:
        """The line that --json prints."""
        made = self.registration
        answer: dict[str, Any] = {
            "run_id": self.run.run_id,
            "run_dir": str(self.run.folder),
            "model": made and {"name": made.model_name, "version": made.version, "alias": made.alias},
            "alarm": made and made.alarm,
            # JSON has no word for what is not a number.
            "metrics": {name: None if math.isnan(value) else value for name, value in self.metrics.items()},
            "stages": {stage: {"seconds": round(manifest.seconds, 3)} for stage, manifest in self.stages.items()},
        }
        return json.dumps(answer, allow_nan=False)


def run_night(
    config: PipelineConfig, *, resume: str | None, until: StageName | None, server: EmbeddedServer | None, command: str
) -> Outcome:
    """Runs the flow to its end. Raises what a stage raised; a traceback of anything unforeseen is left in the run's folder.

    server: the embedded one, none where PREFECT_API_URL names another. command: what starts the run, for a message.
    """
    run = Run(resume or new_run_id(), workspace=config.workspace, experiment=config.registry.experiment)
    if resume is not None and not run.config_file.is_file():
        there = sorted(path.name for path in run.folder.parent.glob("*") if path.is_dir())
        raise InputError(f"--resume {resume}: no such run in {run.folder.parent}; there are {there or 'none'}")
    require_own(run.folder)

    def way_out() -> str:
        begun = run.config_file.is_file()
        return f"resume with: {command} --resume {run.run_id}" if begun else f"no stage had begun; start again with: {command}"

    with (
        workspace_lock(config.workspace, run_id=run.run_id),
        output.stage_lines(),
        interruptible(way_out) as interruption,
    ):
        output.log.print(f"run {run.run_id}", style="bold")
        try:
            with prefect_session(server, log=config.workspace / "prefect.log"):
                from flows.nightly import nightly_retrain

                with explain_disk_full(run.folder):
                    nightly_retrain.with_options(on_running=[interruption.note])(config, run_id=run.run_id, until=until)
        except TrackingServerError as error:
            raise StageError(f"{error}; the run continues with --resume {run.run_id}") from None
        except NightjarError:
            raise
        except Exception as error:  # whatever a library throws: the person sees one line, the traceback is kept
            raise with_traceback_kept(error, folder=run.folder) from error
    names = list(STAGES)
    done = names[: names.index(until) + 1] if until else names  # what lies there of later stages is of an earlier run
    stages = {stage: load_manifest(run.stage_folder(stage), STAGES[stage], verify=False) for stage in done}
    return Outcome(run, {stage: manifest for stage, manifest in stages.items() if manifest is not None})


def with_traceback_kept(error: Exception, *, folder: Path) -> StageError:
    """One line about something that nobody foresaw; its traceback goes to error.log in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "error.log"
    log.write_text(redacted("".join(traceback.format_exception(error))))
    return StageError(redacted(f"{type(error).__name__}: {error}\nthe traceback is in {log}"))


def print_outcome(outcome: Outcome, *, file: Path, overrides: Sequence[str]) -> None:
    """Metrics beside baselines and champion, the served metrics, and where to look next."""
    console = output.out
    made = outcome.registration
    if outcome.stages.get("evaluate"):
        console.print("\n[bold]Exact, over the full catalogue[/]")
        output.print_metrics(metric_table(outcome.metrics), console=console)
    if made is not None:
        console.print("\n[bold]As served[/] (the package, asked in a fresh process)")
        names = sorted({name.partition("/")[2] for name in made.metrics})
        measured = ("served", "champion", "former_champion", "popularity")
        contenders = [who for who in measured if f"{who}/{names[0]}" in made.metrics]
        rows = [[who, *(f"{made.metrics[f'{who}/{name}']:.4f}" for name in names)] for who in contenders]
        output.print_table(["test", *names], rows, console=console)
    console.print()
    facts = {"run": str(outcome.run.folder)}
    train = outcome.stages.get("train")
    if isinstance(train, TrainManifest) and train.best_epoch is not None:
        values = ", ".join(f"{name} {value:.4f}" for name, value in train.validation.items())
        facts["trained"] = f"epoch {train.best_epoch} of {train.epochs} is the best on the validation split: {values}"
    report = outcome.stages.get("check_data")
    if report is not None:
        facts["data"] = str(report.path("report.html"))
    if made is not None:
        facts["model"] = f"{made.model_name} version {made.version}, {made.alias}: {made.reasons[0]}"
        if made.alarm is not None:
            facts["alarm"] = made.alarm
        facts["ask it"] = f"nightjar query {file} --user ID -k 10"
        facts["look"] = f"nightjar ui {file}"
    else:
        again = "".join(f" --set {override}" for override in overrides)
        facts["go on"] = f"nightjar run {file}{again} --resume {outcome.run.run_id}"
    output.print_facts(facts, console=console)
