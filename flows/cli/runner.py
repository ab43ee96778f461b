"""Flow runs from the command line: the session in which a command runs a flow, `nightjar run`, and the choice of a champion."""

import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flows.cli import output
from flows.cli.arguments import ConfigOptions
from flows.interruption import interruptible
from flows.runs.input_checks import check_inputs
from flows.runs.results import RunResults
from flows.runs.resume import check_resume
from flows.servers.prefect_server import PrefectServer, prefect_session
from flows.settings.config_file import LoadedConfig
from flows.settings.environment import prepare_environment, set_flow_run_retention
from flows.settings.pipeline import PipelineConfig
from recsys_core.data_report.limits import describe_held_out_users
from recsys_core.disk import explain_disk_full
from recsys_core.errors import InputError, NightjarError, StageError, TrackingServerError, redacted
from recsys_core.evaluation.report import metric_table
from recsys_core.manifests import STAGES, DataReportManifest, EvaluationManifest, StageName, TrainManifest, require_own_folder
from tasks.runs.context import StageContext
from tasks.runs.options import RunOptions
from tasks.runs.run_record import RunRecord, write_traceback
from tasks.runs.workspace import Workspace


class PrefectServerError(StageError):
    """The Prefect server did not answer for two minutes, or returned an error."""


@dataclass(frozen=True)
class Command:
    """A command that runs a flow.

    Attributes:
        server: the embedded Prefect server; None if PREFECT_API_URL names another server.
        command_line: text that is shown to the user for resuming.
    """

    config: PipelineConfig
    server: PrefectServer | None
    command_line: str


def format_command(command_name: str, loaded: LoadedConfig, command_options: Sequence[str] = ()) -> str:
    """Return the command line, quoted for a shell."""
    override_options = [word for override in loaded.overrides for word in ("--set", override)]
    return shlex.join(["nightjar", command_name, str(loaded.path), *override_options, *command_options])


@contextmanager
def flow_session(
    load_flow: Callable[[], Any], command: Command, *, run_id: str, folder: Path, how_to_resume: Callable[[], str]
) -> Iterator[Any]:
    """Yield a flow in a Prefect session. Hold the lock of the workspace, and handle signals and errors of the body.

    Args:
        load_flow: imports and returns the flow, while the server starts.
        run_id: id of the run, shown in the error of another command that needs the lock.
        folder: folder of the run; the traceback of an unexpected error is written to error.log in it.
        how_to_resume: returns the last line that a user sees after an interruption.

    Raises:
        NightjarError: the flow raised it.
        PrefectServerError: the Prefect server does not work.
        StageError: the flow raised any other exception.
    """
    workspace = command.config.workspace
    set_flow_run_retention(num_days=command.config.retention.flow_run_days)
    with Workspace(workspace).lock(run_id=run_id), output.stage_lines(), interruptible(how_to_resume) as interruption:
        output.stderr.print(f"run {run_id}", style="bold")
        try:
            session = prefect_session(command.server, load_flow, log_file=workspace / "prefect.log")
            with session as flow, explain_disk_full(folder):
                yield flow.with_options(on_running=[interruption.set_flow_run])
        except NightjarError:
            raise
        except Exception as error:  # any error of a library
            raise _prefect_error(error) or save_traceback(error, folder=folder) from error


def _prefect_error(error: Exception) -> PrefectServerError | None:
    """Convert an error of Prefect's client to one sentence; None if it is another error."""
    from httpx import HTTPError  # MLflow's client raises other types

    if not isinstance(error, HTTPError) and not str(error).startswith("Failed to reach API"):
        return None
    problem = f"Prefect at {os.environ.get('PREFECT_API_URL')} does not work: {type(error).__name__}: {error}"
    return PrefectServerError(redacted(f"{' '.join(problem.split())}; check the server and PREFECT_API_URL"))


def save_traceback(error: Exception, *, folder: Path) -> StageError:
    """Write the traceback of an unexpected error to error.log in `folder`; return an error that names the file."""
    log_file = write_traceback(error, folder=folder)
    return StageError(redacted(f"{type(error).__name__}: {error}\nthe traceback is in {log_file}"))


def prepare_run(
    options: ConfigOptions, server: PrefectServer | None, *, until: str | None, run_options: RunOptions
) -> tuple[Command, StageName | None]:
    """Check the options, the config and the input of `nightjar run`; return the command and its last stage."""
    last_stage = next((stage for stage in STAGES if stage == until), None)
    if until is not None and last_stage is None:
        raise InputError(f"--until {until}: no such stage; the stages are {', '.join(STAGES)}")
    loaded = options.read()
    with output.log_lines():  # tens of thousands of files take minutes
        check_inputs(loaded.config)
    prepare_environment(loaded.config.workspace)
    words = ["--reason", run_options.reason] * bool(run_options.reason) + ["--full-retrain"] * run_options.full_retrain
    words += ["--promote", run_options.promote] * (run_options.promote != "by_gate") + ["--dry-run"] * run_options.dry_run
    return Command(loaded.config, server, command_line=format_command("run", loaded, words)), last_stage


def run_nightly(command: Command, *, resume: str | None, until: StageName | None, options: RunOptions) -> RunResults:
    """Run the nightly flow to its end, or to the stage `until`; resume the run `resume` unless it is None."""
    config = command.config
    workspace = Workspace(config.workspace)
    run = StageContext(workspace.run(resume or workspace.new_run_id()), options=options, until=until).run
    if resume is not None:
        check_resume(config, run)
    require_own_folder(run.folder)

    def load_flow() -> Any:
        from flows.nightly import nightly_retrain

        if command.server is not None:  # while the server starts, one core is idle
            import matplotlib.figure  # noqa: F401  for the page of the last runs

            if until is None or not until.startswith("ingest"):
                import torch  # noqa: F401  for the stages after the ingest

        return nightly_retrain

    def how_to_resume() -> str:
        if run.config_file.is_file():
            return f"resume with: {command.command_line} --resume {run.run_id}"
        return f"no stage had begun; start again with: {command.command_line}"

    try:
        with flow_session(load_flow, command, run_id=run.run_id, folder=run.folder, how_to_resume=how_to_resume) as retrain:
            retrain(config, run_id=run.run_id, until=until, options=options)
    except TrackingServerError as error:
        raise StageError(f"{error}; resume the run with --resume {run.run_id}") from None
    except PrefectServerError as error:
        record = RunRecord.read(run)
        if record is None or record.state in ("Failed", "Interrupted"):
            raise StageError(f"{error}; {how_to_resume()}") from None
        output.print_warning(f"{error}; the run ended as {record.state}, but Prefect did not receive this state")
    # The run's folder may hold later stages from an earlier start of the run.
    return RunResults.read(run, until="package" if options.dry_run and until in (None, "register") else until)


def print_results(results: RunResults, *, config_path: Path, command_line: str) -> None:
    """Print a table of metrics, and the paths and commands for the run's results.

    Args:
        command_line: text of the command that resumes the run, without --resume.
    """
    registration = results.registration
    evaluation = results.stages.get(EvaluationManifest)
    if evaluation is not None:
        output.stdout.print("\n[bold]Metrics over the full catalogue[/]")
        table = metric_table(results.metrics, half_widths=evaluation.half_widths)
        output.print_metrics(table, served_metrics=registration.metrics if registration else {}, console=output.stdout)
        output.stdout.print()
    facts = {"run": str(results.run.folder)}
    train = results.stages.get(TrainManifest)
    if train is not None and train.best_epoch is not None:
        metric_values = ", ".join(f"{metric_name} {value:.4f}" for metric_name, value in train.validation.items())
        facts["best epoch"] = f"{train.best_epoch} of {train.epochs}, on the validation split: {metric_values}"
    data_report = results.stages.get(DataReportManifest)
    if data_report is not None:
        facts["data"] = describe_held_out_users(data_report.metrics)
        facts["data report"] = str(data_report.path("report.html"))
    if registration is not None:
        version_name = f"{registration.model_name} version {registration.version}"
        facts["model"] = f"{version_name}, {registration.alias}: {registration.reasons[0]}"
        if registration.alarm is not None:
            facts["alarm"] = registration.alarm
        facts["decision"] = str(results.run.folder / registration.pages["decision"])
        facts["query"] = f"nightjar query {config_path} --user ID -k 10"
        facts["browse"] = f"nightjar ui {config_path}"
    else:
        facts["resume"] = f"{command_line} --resume {results.run.run_id}"
    output.print_facts(facts, console=output.stdout)


def choose_champion(loaded: LoadedConfig, command: Literal["promote", "rollback"], *, parameters: Mapping[str, Any]) -> None:
    """Run the flow `command` and print its result.

    If PREFECT_API_URL is set, that server records the flow run and its event. Otherwise the function of the flow runs without a
    Prefect server, so an urgent rollback depends on fewer parts.
    """
    with interruptible(lambda: f"look at the aliases with: nightjar releases {loaded.path}"):
        try:
            from flows import champion
            from flows.scheduled import deployments  # takes seconds

            flow: Any = {"promote": champion.promote, "rollback": champion.rollback}[command]
            flow_parameters = {**loaded.flow_parameters, **parameters}
            if "PREFECT_API_URL" in os.environ:
                with deployments.prefect_client():  # raises InputError if the server does not answer
                    final_state = flow(**flow_parameters, return_state=True)
            else:
                final_state = flow.fn(**flow_parameters)
            if final_state.is_failed():
                final_state.result()  # raises the error of the flow
        except NightjarError:
            raise
        except Exception as error:  # any error of a library
            raise save_traceback(error, folder=loaded.config.workspace) from error
    facts = {"result": final_state.message, "versions": f"nightjar releases {loaded.path}"}
    output.print_facts(facts, console=output.stdout)
