"""Publishers: systems that are informed of each alias that moves to another version, so that they can deploy the version."""

from dataclasses import dataclass
from typing import Protocol

from prefect.events import emit_event

from tasks.progress.reporting import LOG


@dataclass(frozen=True)
class AliasChange:
    """An alias that moved to another version of a model.

    Attributes:
        old_version: version that had the alias; None if no version had it.
        new_version: version that has the alias; None if the alias was removed.
        reason: why the alias moved.
        is_late: whether the process that moved the alias was killed before it could inform the publishers.
    """

    model_name: str
    alias: str
    old_version: str | None
    new_version: str | None
    reason: str
    is_late: bool = False


class Publisher(Protocol):
    """Another system that is informed of moved aliases. `publishers_of` returns all of them."""

    def publish(self, change: AliasChange) -> None:
        """Send the change. Log an error as a warning, because the alias has already moved."""


@dataclass(frozen=True)
class PrefectEvents:
    """Publisher that sends the event nightjar.<alias>.changed of the resource nightjar.model.<name>.

    Prefect adds the flow run, its deployment and its tags as related resources. Outside a flow run nothing is sent.

    Attributes:
        run_id: the run that moves the alias; None if a person moves it.
    """

    flow_run_id: str | None
    pipeline: str
    run_reason: str
    run_id: str | None

    def publish(self, change: AliasChange) -> None:
        """Send the event. If it cannot be sent, log a warning."""
        if self.flow_run_id is None:
            return
        event_name = f"nightjar.{change.alias}.changed"
        resource = {"prefect.resource.id": f"nightjar.model.{change.model_name}", "prefect.resource.name": change.model_name}
        payload = {
            "model": change.model_name,
            "alias": change.alias,
            "old_version": change.old_version,
            "new_version": change.new_version,
            "reason": change.reason,
            "run_reason": "" if change.is_late else self.run_reason,  # another run may have moved the alias
            "pipeline": self.pipeline,
            "run_id": None if change.is_late else self.run_id,
        }
        try:
            emit_event(event_name, resource=resource, payload=payload)
        except Exception as error:  # any error of Prefect's events client
            LOG.warning("could not send the event %s to Prefect (%s: %s)", event_name, type(error).__name__, error)


def publishers_of(flow_run_id: str | None, pipeline: str, *, run_reason: str, run_id: str | None) -> list[Publisher]:
    """Return the publishers for the aliases that a flow run moves. The arguments are fields of PrefectEvents."""
    return [PrefectEvents(flow_run_id, pipeline, run_reason, run_id)]
