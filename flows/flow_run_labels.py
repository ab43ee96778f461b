"""Names and tags of flow runs. They contain the name of the pipeline, which identifies its runs on a shared server."""

import logging
from uuid import UUID

from prefect import get_client, runtime
from prefect.utilities.urls import url_for

LOG = logging.getLogger("nightjar")
MAX_TAG_CHARACTERS = 80


def default_run_id() -> str:
    """Return the run id of the current flow run: the scheduled time in UTC, and four characters of the flow run's id.

    If Prefect itself retries the flow run, the flow run keeps its id, so the retry resumes the run in the same folder.
    """
    return f"{runtime.flow_run.scheduled_start_time:%Y%m%d-%H%M%S}-{runtime.flow_run.id[:4]}"


def flow_run_name(pipeline_name: str, *, run_id: str | None, reason: str = "") -> str:
    """Return the name of the current flow run: pipeline, run id and reason. The run id begins with the start time."""
    return f"{pipeline_name} {run_id or default_run_id()}" + (f": {reason}" if reason else "")


def flow_run_url() -> str | None:
    """Return the address of the current flow run in the Prefect UI; None outside a flow run and without a UI."""
    flow_run_id = runtime.flow_run.id
    return None if flow_run_id is None else url_for("flow-run", obj_id=flow_run_id)


def tag_flow_run(pipeline_name: str, *, reason: str = "") -> None:
    """Add the tags pipeline:<name> and reason:<text> to the current flow run. Log an error as a warning."""
    flow_run_id = runtime.flow_run.id
    if flow_run_id is None:  # the flow's function was called without Prefect
        return
    tags = {*runtime.flow_run.tags, f"pipeline:{pipeline_name}"[:MAX_TAG_CHARACTERS]}
    if reason:
        tags.add(f"reason:{reason}"[:MAX_TAG_CHARACTERS])
    try:
        with get_client(sync_client=True) as client:
            client.update_flow_run(UUID(flow_run_id), tags=sorted(tags))
    except Exception as error:  # any error of the server or the network
        LOG.warning("could not tag the flow run in Prefect (%s: %s); the run continues", type(error).__name__, error)
