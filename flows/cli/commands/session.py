"""The session in which a command runs a flow: lock, progress in the terminal, signals, Prefect, and errors in one sentence."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.cli import output
from flows.interruption import interruptible
from flows.servers.prefect_server import PrefectServer, prefect_session
from flows.servers.prefect_server import embedded_server as embedded_server
from flows.settings.environment import set_flow_run_retention
from flows.settings.pipeline import PipelineConfig
from recsys_core.disk import explain_disk_full
from recsys_core.errors import NightjarError, StageError, redacted
from tasks.runs.run import Run
from tasks.runs.run_record import write_traceback
from tasks.runs.workspace import Workspace


class PrefectServerError(StageError):
    """The Prefect server did not answer for two minutes, or returned an error."""


@dataclass(frozen=True)
class FlowCommand:
    """A command that runs a flow.

    Attributes:
        server: the embedded Prefect server; None if PREFECT_API_URL names another server.
        run: the run. If the flow starts several runs, their common folder as a Run. The traceback of an unexpected error is
            written to error.log in this folder.
        line: the command line that starts the flow again.
        resume_option: option with which `line` resumes the run; empty if `line` itself resumes it.
    """

    config: PipelineConfig
    server: PrefectServer | None
    run: Run
    line: str
    resume_option: str = ""

    def how_to_resume(self) -> str:
        """Return a sentence with the command that resumes the run, or starts it again."""
        if self.resume_option and not self.run.config_file.is_file():
            return f"no stage had begun; start again with: {self.line}"
        return f"resume with: {self.line}{self.resume_option}"


@contextmanager
def flow_session(command: FlowCommand, flow_path: str) -> Iterator[Any]:
    """Yield the flow at `flow_path` (module:name) once Prefect answers.

    Raises:
        Interrupted: a signal ended the body.
        NightjarError: the flow raised this error.
        PrefectServerError: the Prefect server does not work.
        StageError: the body raised any other exception.
    """
    workspace, run = command.config.workspace, command.run
    set_flow_run_retention(num_days=command.config.retention.flow_run_days)
    with (
        Workspace(workspace).lock(run_id=run.run_id),
        output.printed_stages(),
        interruptible(command.how_to_resume) as interruption,
        one_sentence_errors(run.folder),
    ):
        output.stderr.print(f"run {run.run_id}", style="bold")
        with (
            prefect_session(command.server, flow_path, log_file=workspace / "prefect.log") as flow,
            explain_disk_full(run.folder),
        ):
            if command.server is not None:
                from flows.prefect_runs import end_lost_runs_of_commands  # prefect_session has imported Prefect

                end_lost_runs_of_commands()
            try:
                yield flow.with_options(on_running=[interruption.set_flow_run])
            except Exception:  # after a signal, a library may raise its own error, for which Prefect sets Failed
                interruption.end_flow_run()
                raise


@contextmanager
def one_sentence_errors(folder: Path) -> Iterator[None]:
    """Convert an unexpected error of the body to a StageError, and write its traceback to error.log in `folder`."""
    try:
        yield
    except NightjarError:
        raise
    except Exception as error:  # any error of a library
        from httpx import HTTPError  # the error of Prefect's client; MLflow's client raises other errors

        if isinstance(error, HTTPError) or str(error).startswith("Failed to reach API"):
            problem = f"Prefect at {os.environ.get('PREFECT_API_URL')} does not work: {type(error).__name__}: {error}"
            raise PrefectServerError(redacted(f"{' '.join(problem.split())}; check the server and PREFECT_API_URL")) from error
        log_file = write_traceback(error, folder=folder)
        raise StageError(redacted(f"{type(error).__name__}: {error}\nthe traceback is in {log_file}")) from error
