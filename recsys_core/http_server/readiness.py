"""Answer of /readyz: the served version, and why a newer champion is not served."""

from datetime import UTC, datetime

from recsys_core.http_server.api import Readiness, RegistryState
from recsys_core.http_server.release import Champion, WorkerState


def readiness(state: WorkerState, champion: Champion | None) -> tuple[int, Readiness]:
    """Return status and content: 200 while a version is served, also if a newer one or the registry does not work."""
    if champion is None or state.version is None:
        return 503, Readiness(status="no version is loaded", version=None, problem=state.problem, registry=None)
    down_since = champion.registry_down_since
    registry = RegistryState(
        answered_at=_time(champion.registry_answered_at),
        down_since=None if down_since is None else _time(down_since),
        problem=champion.registry_problem,
    )
    problem = champion.problem or state.problem
    return 200, Readiness(status="ready", version=state.version, problem=problem, registry=registry)


def _time(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%SZ}"
