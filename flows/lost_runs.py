"""Flow runs whose process died without a report. Prefect shows such a run as Running until this module ends it."""

import logging
from collections.abc import Sequence
from uuid import UUID

from prefect import runtime
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import State
from prefect.states import Crashed

LOG = logging.getLogger("nightjar")


def end_lost_runs(
    client: SyncPrefectClient, deployment_id: UUID, *, state_types: Sequence[str], current_flow_run_id: UUID | None = None
) -> None:
    """Set the flow runs of a deployment to Crashed if their state has one of `state_types`. This frees their concurrency slots.

    Call this function only if no process of these flow runs can be alive. The flow run `current_flow_run_id` is not changed.
    """
    run_filter = {"deployment_id": {"any_": [deployment_id]}, "state": {"type": {"any_": list(state_types)}}}
    for lost_run in client.read_flow_runs(flow_run_filter=FlowRunFilter.model_validate(run_filter)):
        if lost_run.id != current_flow_run_id:
            LOG.warning("the process of flow run %s has died; the flow run ends as Crashed", lost_run.name)
            crashed_state: State = Crashed(message="the process of this run died: its worker or machine was stopped")
            client.set_flow_run_state(lost_run.id, crashed_state, force=True)


def end_earlier_runs() -> None:
    """End the lost runs of the current flow run's deployment.

    The caller holds the lock of the workspace, so the process of every other Running flow run has died. The
    process of every other Pending flow run has died too, because the current flow run has the only slot of the deployment. A
    flow run that waits for the slot is Scheduled and is not changed.

    A failure is logged and does not affect the current flow run.
    """
    if runtime.deployment.id is None:
        return
    try:
        with get_client(sync_client=True) as client:
            end_lost_runs(
                client,
                UUID(runtime.deployment.id),
                state_types=["RUNNING", "PENDING", "CANCELLING"],
                current_flow_run_id=UUID(runtime.flow_run.id),
            )
    except Exception as error:  # any error of Prefect or the network
        LOG.warning("could not end lost flow runs (%s: %s); this run is not affected", type(error).__name__, error)
