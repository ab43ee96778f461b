"""Access to Prefect: its client, fields of the form that starts a run, and the names and states of flow runs."""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any
from uuid import UUID

import httpx
import prefect
from prefect import Flow, runtime
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, TaskRunFilter
from prefect.client.schemas.objects import TERMINAL_STATES, FlowRun, State, StateType
from prefect.exceptions import PrefectHTTPStatusError
from prefect.states import Crashed, Failed
from prefect.utilities.urls import url_for
from pydantic import Field

from flows.settings.config_file import load_config
from flows.settings.pipeline import PipelineConfig
from recsys_core.config import MAX_PATH_CHARACTERS
from recsys_core.errors import InputError, first_line, printable, redacted
from recsys_core.preflight import is_compatible_server
from tasks.runs.workspace import Workspace

LOG = logging.getLogger("nightjar")
MAX_TAG_CHARACTERS = 80
MAX_OVERRIDES = 100


@contextmanager
def prefect_client() -> Iterator[SyncPrefectClient]:
    """Yield a client of the server in PREFECT_API_URL; raise InputError if the server does not answer or is incompatible."""
    shown_url = redacted(os.environ["PREFECT_API_URL"])
    try:
        with get_client(sync_client=True) as client:
            _check_server_version(client.api_version(), shown_url=shown_url)
            yield client
    except (httpx.HTTPError, PrefectHTTPStatusError, RuntimeError) as error:
        http_status = error.response.status_code if isinstance(error, httpx.HTTPStatusError) else None
        if http_status in (401, 403):
            raise InputError(
                f"the Prefect server at {shown_url} rejects the request with HTTP status {http_status}; set "
                "PREFECT_API_AUTH_STRING or PREFECT_API_KEY to the secret of the server"
            ) from None
        cause = error.__cause__ or error
        problem = f"{type(cause).__name__}: {first_line(cause)}"
        raise InputError(
            redacted(f"the Prefect server at {shown_url} does not work: {problem}; check the server and PREFECT_API_URL")
        ) from None


def _check_server_version(server_version: str, *, shown_url: str) -> None:
    if not is_compatible_server(server_version, prefect.__version__):
        raise InputError(
            f"the Prefect server at {shown_url} has version {server_version}, but this installation of nightjar has Prefect "
            f"{prefect.__version__}; the server needs the same major version and must not be older: update the server first"
        )


def titled_field(title: str) -> Any:
    """Return a field that sets the title of a flow parameter in the form of the Prefect UI.

    The form takes the description of the parameter from the flow's docstring.
    """
    return Field(json_schema_extra={"title": title})


ConfigPath = Annotated[str, titled_field("Pipeline"), Field(min_length=1, max_length=MAX_PATH_CHARACTERS)]
Overrides = Annotated[tuple[str, ...], titled_field("Settings to override"), Field(max_length=MAX_OVERRIDES)]


def load_form_config(path: str, overrides: Sequence[str] = ()) -> PipelineConfig:
    """Read the config that a form names, as `load_config` does.

    In a run of a deployment, an error quotes the file only if the file is in the folder of the deployment's own config.
    Otherwise, anyone with access to the form could read all files of the worker.
    """
    try:
        return load_config(path, overrides)
    except InputError:
        if runtime.deployment.id is None:
            raise
        with get_client(sync_client=True) as client:
            deployed_path = client.read_deployment(UUID(runtime.deployment.id)).parameters.get("pipeline")
        if deployed_path is not None and Path(path).resolve().is_relative_to(Path(deployed_path).parent.resolve()):
            raise
    raise InputError(
        f"{printable(path)}: the config file or one of the overrides is invalid; the reason is shown only for files in the "
        "folder of the deployment's own config; run nightjar validate on the worker"
    )


def fail_run_with_unknown_parameters(flow: Flow[..., Any], flow_run: FlowRun, state: State) -> None:
    """Set a flow run with unknown parameters to Failed. Prefect calls this hook for a flow run that it cannot start."""
    unknown_names = sorted(flow_run.parameters.keys() - flow.parameters.properties.keys())
    if unknown_names:
        message = (
            f"unknown parameters {', '.join(map(printable, unknown_names))}; the parameters of {flow.name} are "
            f"{', '.join(flow.parameters.properties)}; give settings of the config as overrides, e.g. training.epochs=3"
        )
        failed_state: State = Failed(message=message)
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(flow_run.id, failed_state, force=True)


def run_id_of_flow_run(workspace: Workspace) -> str:
    """Return the run id of the current flow run in `workspace`: a time, and eight characters of the flow run's id.

    The time is the later of two times: the scheduled start, and one second after the newest run id of the workspace. A
    retried flow run keeps its id, so the retry resumes the run in the same folder.
    """
    id_suffix = f"-{runtime.flow_run.id[:8]}"
    earlier_run_id = next((run.run_id for run in workspace.runs() if run.run_id.endswith(id_suffix)), None)
    return earlier_run_id or workspace.new_run_id(at=runtime.flow_run.scheduled_start_time)[:15] + id_suffix


def flow_run_url() -> str | None:
    """Return the address of the current flow run in the Prefect UI; None outside a flow run, or if the server has no UI."""
    flow_run_id = runtime.flow_run.id
    return None if flow_run_id is None else url_for("flow-run", obj_id=flow_run_id)


def name_flow_run(pipeline_name: str, run_label: str, *, reason: str = "") -> None:
    """Set name and tags of the current flow run. Log an error as a warning.

    The name consists of the pipeline, `run_label` (a run id, or a word such as tune) and the reason. The tags are
    pipeline:<name> and reason:<text>.
    """
    flow_run_id = runtime.flow_run.id
    if flow_run_id is None:  # the flow's function was called without Prefect
        return
    name = f"{pipeline_name} {run_label}" + (f": {reason}" if reason else "")
    new_tags = [f"pipeline:{pipeline_name}"] + ([f"reason:{reason}"] if reason else [])
    tags = {*runtime.flow_run.tags, *(tag[:MAX_TAG_CHARACTERS] for tag in new_tags)}
    try:
        with get_client(sync_client=True) as client:
            client.update_flow_run(UUID(flow_run_id), tags=sorted(tags), name=name)
    except Exception as error:  # any error of the server or the network
        LOG.warning("could not name the flow run in Prefect (%s: %s); the run continues", type(error).__name__, error)


def end_as_crashed(flow_run_id: UUID, *, message: str, only_running: bool = False) -> None:
    """Set a flow run and its unfinished task runs to Crashed. This frees the concurrency slot of the flow run.

    Args:
        only_running: change the flow run only if it is Running.
    """
    crashed_state: State = Crashed(message=message)
    # The server selects the unfinished task runs, because it returns at most 200 task runs.
    unfinished_states = [state_type for state_type in StateType if state_type not in TERMINAL_STATES]
    unfinished_task_filter = TaskRunFilter.model_validate({"state": {"type": {"any_": unfinished_states}}})
    with get_client(sync_client=True) as client:
        if only_running and client.read_flow_run(flow_run_id).state_type != StateType.RUNNING:
            return
        client.set_flow_run_state(flow_run_id, crashed_state, force=True)
        flow_run_filter = _flow_run_filter(id={"any_": [flow_run_id]})
        for task_run in client.read_task_runs(flow_run_filter=flow_run_filter, task_run_filter=unfinished_task_filter):
            client.set_task_run_state(task_run.id, crashed_state, force=True)


def end_lost_runs(deployment_id: UUID | None, *, current_flow_run_id: UUID | None = None) -> None:
    """Set the Running, Pending and Cancelling flow runs of a deployment to Crashed.

    If a flow run is already Crashed, its task runs in these states are set to Crashed. Call this function only if no process of
    these flow runs can be alive.

    Args:
        deployment_id: None for the flow runs without a deployment.
        current_flow_run_id: id of a flow run that is not changed.
    """
    deployment_condition = {"is_null_": True} if deployment_id is None else {"any_": [deployment_id]}
    state_condition = {"type": {"any_": ["RUNNING", "PENDING", "CANCELLING"]}}
    with get_client(sync_client=True) as client:
        lost_runs = client.read_flow_runs(
            flow_run_filter=_flow_run_filter(deployment_id=deployment_condition, state=state_condition)
        )
        # The server stores the states of task runs with a delay, so a state may arrive after the end of the flow run.
        crashed_run_filter = _flow_run_filter(deployment_id=deployment_condition, state={"type": {"any_": ["CRASHED"]}})
        unfinished_task_filter = TaskRunFilter.model_validate({"state": state_condition})
        for task_run in client.read_task_runs(flow_run_filter=crashed_run_filter, task_run_filter=unfinished_task_filter):
            client.set_task_run_state(task_run.id, Crashed(message="the flow run of this task run has ended"), force=True)
    for lost_run in lost_runs:
        if lost_run.id != current_flow_run_id:
            LOG.warning("the process of flow run %s has died; the flow run ends as Crashed", lost_run.name)
            end_as_crashed(lost_run.id, message="the process of this run died: its worker or machine was stopped")


def end_lost_runs_of_deployment() -> None:
    """End the lost runs of the current flow run's deployment. A failure is logged and does not affect the current flow run.

    The caller holds the lock of the workspace, so the process of every other Running flow run has died. The process of every
    other Pending flow run has died too, because the current flow run has the only slot of the deployment. A flow run that waits
    for the slot is Scheduled and is not changed.
    """
    if runtime.deployment.id is not None:
        with _warn_of_errors():
            end_lost_runs(UUID(runtime.deployment.id), current_flow_run_id=UUID(runtime.flow_run.id))


def end_lost_runs_of_commands() -> None:
    """End the lost flow runs of earlier commands, before the flow of this command starts. A failure is logged.

    The Prefect server belongs to the workspace, and the caller holds the lock of the workspace, so the process of every Running
    flow run without a deployment has died.
    """
    with _warn_of_errors():
        end_lost_runs(None)


@contextmanager
def _warn_of_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # any error of Prefect or the network
        LOG.warning("could not end lost flow runs (%s: %s); this run is not affected", type(error).__name__, error)


def _flow_run_filter(**conditions: Any) -> FlowRunFilter:
    return FlowRunFilter.model_validate(conditions)
