"""The registered model of a pipeline in MLflow: its versions, their tags and its aliases.

Every call is retried while MLflow is temporarily unavailable. An alias is moved only by `Registry.move_champion` and
`Registry.move_challenger`.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion

from tasks.delivery.publishers import AliasChange, Publisher
from tasks.registry.mlflow_client import call_with_retries, connect, tracking_uri
from tasks.registry.releases import (
    FORMER_CHAMPION_TAG,
    UNPUBLISHED_TAG,
    champion_of,
    former_champions,
    version_number_by_alias,
)

READ_BACK_DELAY_S = 0.2
"""Pause before a moved alias is read back, so that the move of another process at the same time is noticed."""

T = TypeVar("T")


def version_number_text(version: ModelVersion | None) -> str | None:
    """Return the number of a version as text: MLflow gives an int from sqlite and a str over REST."""
    return None if version is None else str(version.version)


@dataclass(frozen=True)
class Registry:
    """The versions and aliases of one registered model.

    Attributes:
        publishers: systems that are informed of each moved alias.
    """

    client: MlflowClient
    model_name: str
    publishers: Sequence[Publisher] = ()

    @classmethod
    def connect(cls, workspace: Path, model_name: str, *, publishers: Sequence[Publisher] = ()) -> Self:
        """Connect to the MLflow of the workspace; raise TrackingServerError if it does not answer."""
        client = call_with_retries(lambda: connect(workspace), uri=tracking_uri(workspace))
        return cls(client, model_name, publishers)

    def call(self, function: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Return function(*arguments, **options), repeated with backoff while MLflow is temporarily unavailable."""
        return call_with_retries(partial(function, *arguments, **options), uri=self.client.tracking_uri)

    def champion(self) -> ModelVersion | None:
        """Return the version with the alias champion; None if there is none."""
        return self.call(champion_of, self.client, self.model_name)

    def former_champions(self) -> list[ModelVersion]:
        """Return the former champions, the most recent first, except versions that did not load in a later comparison."""
        return self.call(former_champions, self.client, self.model_name)

    def aliases(self) -> dict[str, str]:
        """Return the version number by alias."""
        return self.call(version_number_by_alias, self.client, self.model_name) or {}

    def version(self, version_number: object) -> ModelVersion:
        """Return a version with its current tags and aliases."""
        return self.call(self.client.get_model_version, self.model_name, str(version_number))

    def versions(self) -> list[ModelVersion]:
        """Return all versions."""
        return list(self.call(self.client.search_model_versions, f"name = '{self.model_name}'"))

    def set_tag(self, version: ModelVersion, tag: str, value: str) -> None:
        """Set a tag of a version."""
        self.call(self.client.set_model_version_tag, self.model_name, str(version.version), tag, value)

    def remove_tag(self, version: ModelVersion, tag: str) -> None:
        """Remove a tag of a version, if the version has it."""
        if tag in version.tags:
            self.call(self.client.delete_model_version_tag, self.model_name, str(version.version), tag)

    def move_champion(
        self, version: ModelVersion, *, expected_champion: ModelVersion | None, reason: str, mark_as_former: bool = True
    ) -> bool:
        """Make `version` the champion and return True; return False if `expected_champion` is no longer the champion.

        MLflow sets an alias unconditionally. The alias is therefore read before and after the move. If another process has
        overwritten the alias, the move counts as failed.

        The publishers are informed of each move at least once: if the process is killed first, the next move informs them.

        Args:
            mark_as_former: tag the replaced champion, so that the gate can return to this version later.
        """
        expected_number, new_number = version_number_text(expected_champion), str(version.version)
        champion = self.champion()
        if version_number_text(champion) != expected_number:
            return False
        self._publish_late(champion)
        if expected_number == new_number:
            return True
        if expected_champion is not None and mark_as_former:
            self._mark_as_former(expected_champion)
        self.set_tag(version, UNPUBLISHED_TAG, json.dumps({"old_version": expected_number, "reason": reason}))
        self.call(self.client.set_registered_model_alias, self.model_name, "champion", new_number)
        time.sleep(READ_BACK_DELAY_S)
        is_moved = self.aliases().get("champion") == new_number
        if is_moved:
            self._publish(AliasChange(self.model_name, "champion", expected_number, new_number, reason))
        self.call(self.client.delete_model_version_tag, self.model_name, new_number, UNPUBLISHED_TAG)
        return is_moved

    def _publish_late(self, champion: ModelVersion | None) -> None:
        """Inform the publishers of the new champion if the process that moved the alias was killed before it informed them."""
        if champion is not None and UNPUBLISHED_TAG in champion.tags and self.publishers:
            move = json.loads(champion.tags[UNPUBLISHED_TAG])
            self._publish(AliasChange(self.model_name, "champion", **move, new_version=str(champion.version), is_late=True))
            self.remove_tag(champion, UNPUBLISHED_TAG)

    def _mark_as_former(self, version: ModelVersion) -> None:
        """Tag a version with the current time, or with the second after the newest such tag if this is later."""
        newest_time_s = max((int(champion.tags[FORMER_CHAMPION_TAG]) for champion in self.former_champions()), default=0)
        self.set_tag(version, FORMER_CHAMPION_TAG, str(max(int(time.time()), newest_time_s + 1)))

    def move_challenger(self, version: ModelVersion | None, *, reason: str) -> None:
        """Give the alias challenger to `version`; remove the alias if `version` is None."""
        self._publish_late(self.champion())
        old_number, new_number = self.aliases().get("challenger"), version_number_text(version)
        if new_number is not None:
            self.call(self.client.set_registered_model_alias, self.model_name, "challenger", new_number)
        elif old_number is not None:
            self.call(self.client.delete_registered_model_alias, self.model_name, "challenger")
        if old_number != new_number:
            self._publish(AliasChange(self.model_name, "challenger", old_number, new_number, reason))

    def _publish(self, change: AliasChange) -> None:
        for publisher in self.publishers:
            publisher.publish(change)
