"""Move of the alias `champion` by compare-and-set, which is also safe between workspaces that share a registry.

MLflow sets an alias unconditionally. Processes therefore take turns at reading and setting it, by Lamport's bakery algorithm
(https://lamport.azurewebsites.net/pubs/bakery.pdf), which does not need a compare-and-set itself. Each process writes only the
turn tag of its own new version: first CHOOSING, then a number above all numbers that it reads. It waits until no other version
is choosing or has a lower number. If the first turn in line does not change for ABANDONED_S, its process has died, and a
waiting process removes its tag.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion

from tasks.registry.releases import FORMER_CHAMPION_TAG, champion_of

TURN_TAG = "nightjar.turn"
CHOOSING = "choosing"
TURN_S = 60.0
"""Length of a turn: a process that needs more time does not move the alias."""
ABANDONED_S = 2 * TURN_S
_POLL_S = 0.5


@dataclass(frozen=True)
class AliasChange:
    """An alias that moved to another version of a model.

    Attributes:
        old_version: version that had the alias; None if there was none.
        new_version: version that has the alias; None if the alias was removed.
        reason: why the alias moved.
    """

    model_name: str
    alias: str
    old_version: str | None
    new_version: str | None
    reason: str


class _Turn(NamedTuple):
    """The turn of a version in the line of all versions with a turn tag."""

    sort_key: int
    version_number: int
    tag: str


def move_champion(
    client: MlflowClient,
    winner: ModelVersion,
    *,
    expected_champion: ModelVersion | None,
    mark_as_former: bool,
    turn_version: ModelVersion,
) -> bool:
    """Give `winner` the alias champion if `expected_champion` still has it; return False if another version has it now.

    Args:
        mark_as_former: tag the replaced champion, so that the gate can fall back on it later.
        turn_version: the new version of this process, which carries the turn tag.
    """
    with _hold_turn(client, turn_version) as is_turn_valid:
        champion = champion_of(client, winner.name)
        if _version_number(champion) != _version_number(expected_champion):
            return False
        if champion is not None and mark_as_former and _version_number(champion) != _version_number(winner):
            client.set_model_version_tag(winner.name, champion.version, FORMER_CHAMPION_TAG, f"{time.time():.0f}")
        if not is_turn_valid():
            return False
        client.set_registered_model_alias(winner.name, "champion", winner.version)
        return True


@contextmanager
def _hold_turn(client: MlflowClient, version: ModelVersion) -> Iterator[Callable[[], bool]]:
    """Wait for the turn of `version` and end it after the body; yield a function that returns whether the turn is valid."""
    model_name, version_number = version.name, str(version.version)
    client.set_model_version_tag(model_name, version_number, TURN_TAG, CHOOSING)
    try:
        highest_turn = max((_turn_sort_key(turn) for turn in _turn_by_version(client, model_name).values()), default=0)
        own_turn = str(highest_turn + 1)
        client.set_model_version_tag(model_name, version_number, TURN_TAG, own_turn)
        _wait_for_turn(client, model_name, version_number=version_number, own_turn=own_turn)
        turn_end_s = time.monotonic() + TURN_S
        yield lambda: time.monotonic() < turn_end_s and _turn_by_version(client, model_name).get(version_number) == own_turn
    finally:
        if version_number in _turn_by_version(client, model_name):
            client.delete_model_version_tag(model_name, version_number, TURN_TAG)


def _wait_for_turn(client: MlflowClient, model_name: str, *, version_number: str, own_turn: str) -> None:
    """Wait until no other version of the model has a turn before (own_turn, version_number)."""
    own_place = (_turn_sort_key(own_turn), int(version_number))
    first_in_line: _Turn | None = None
    first_seen_s = 0.0
    while True:
        now_s = time.monotonic()
        other_turns = [
            _Turn(_turn_sort_key(tag), int(other_number), tag)
            for other_number, tag in _turn_by_version(client, model_name).items()
            if other_number != version_number
        ]
        earlier_turns = [turn for turn in other_turns if (turn.sort_key, turn.version_number) < own_place]
        if not earlier_turns:
            return
        if min(earlier_turns) != first_in_line:
            first_in_line, first_seen_s = min(earlier_turns), now_s
        elif now_s - first_seen_s > ABANDONED_S:
            client.delete_model_version_tag(model_name, str(first_in_line.version_number), TURN_TAG)
        time.sleep(_POLL_S)


def _turn_by_version(client: MlflowClient, model_name: str) -> dict[str, str]:
    """Return the turn tags of all versions by version number."""
    versions = client.search_model_versions(f"name = '{model_name}'")
    return {str(version.version): version.tags[TURN_TAG] for version in versions if TURN_TAG in version.tags}


def _turn_sort_key(turn: str) -> int:
    """Return the sort key of a turn tag: CHOOSING comes before all numbers."""
    return 0 if turn == CHOOSING else int(turn)


def _version_number(version: ModelVersion | None) -> str | None:
    """Return the version number as text: MLflow gives an int from sqlite and a str over REST."""
    return None if version is None else str(version.version)
