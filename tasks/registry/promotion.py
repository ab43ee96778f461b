"""Moving the alias `champion`: a compare-and-set, also between workspaces that share a registry.

MLflow sets an alias unconditionally. Processes therefore take turns at reading and setting it, by Lamport's bakery algorithm
(https://lamport.azurewebsites.net/pubs/bakery.pdf), which needs no compare-and-set: each writes only a tag of the version that
it has on trial, first CHOOSING, then a number above all that it reads, and waits for choosing and lower ones. A process that
died in its turn is passed over when its tag, first in line, has not changed for ABANDONED_S.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion

from tasks.registry.releases import FORMER_CHAMPION_TAG, champion_of

TURN_TAG = "nightjar.turn"
CHOOSING = "choosing"
TURN_S = 60.0
"""A process moves the alias within this time of its turn, or not at all."""
ABANDONED_S = 2 * TURN_S
_POLL_S = 0.5


def move_champion(
    client: MlflowClient, heir: ModelVersion, *, instead_of: ModelVersion | None, keep_former: bool, trial_of: ModelVersion
) -> bool:
    """Gives `heir` the alias champion if `instead_of` still has it; False if another version got it meanwhile.

    keep_former: `instead_of` loads, so later versions may be compared with it; trial_of: the version on trial in this process.
    """
    with _turn(client, trial_of) as is_held:
        champion = champion_of(client, heir.name)
        if _number(champion) != _number(instead_of):
            return False
        if champion is not None and keep_former and _number(champion) != _number(heir):
            client.set_model_version_tag(heir.name, champion.version, FORMER_CHAMPION_TAG, f"{time.time():.0f}")
        if not is_held():
            return False
        client.set_registered_model_alias(heir.name, "champion", heir.version)
        return True


@contextmanager
def _turn(client: MlflowClient, version: ModelVersion) -> Iterator[Callable[[], bool]]:
    """Waits for the turn of `version` and ends it; gives a function that returns whether the turn is still its own."""
    name, number = version.name, str(version.version)
    client.set_model_version_tag(name, number, TURN_TAG, CHOOSING)
    try:
        highest = max((_order(value) for value in _turns(client, name).values()), default=0)
        turn = str(highest + 1)
        client.set_model_version_tag(name, number, TURN_TAG, turn)
        _wait(client, name, number=number, turn=turn)
        expires = time.monotonic() + TURN_S
        yield lambda: time.monotonic() < expires and _turns(client, name).get(number) == turn
    finally:
        if number in _turns(client, name):
            client.delete_model_version_tag(name, number, TURN_TAG)


def _wait(client: MlflowClient, name: str, *, number: str, turn: str) -> None:
    first, first_since = ("", ""), 0.0
    while True:
        now = time.monotonic()
        own = (_order(turn), int(number))
        before = {
            other: value
            for other, value in _turns(client, name).items()
            if other != number and (_order(value), int(other)) < own
        }
        if not before:
            return
        current = min(before.items(), key=lambda item: (_order(item[1]), int(item[0])))
        if current != first:
            first, first_since = current, now
        elif now - first_since > ABANDONED_S:
            client.delete_model_version_tag(name, current[0], TURN_TAG)
        time.sleep(_POLL_S)


def _turns(client: MlflowClient, name: str) -> dict[str, str]:
    """The turn of each version that has or waits for one."""
    versions = client.search_model_versions(f"name = '{name}'")
    return {str(version.version): version.tags[TURN_TAG] for version in versions if TURN_TAG in version.tags}


def _order(turn: str) -> int:
    return 0 if turn == CHOOSING else int(turn)


def _number(version: ModelVersion | None) -> str | None:
    """A version's number as text: an int from sqlite, a str over REST."""
    return None if version is None else str(version.version)
