"""The aliases of a registered model on a real MLflow, also when two processes move `champion` at the same time."""

from pathlib import Path
from unittest.mock import Mock

import pytest

from tasks.delivery.publishers import AliasChange
from tasks.registry import registry as registry_module
from tasks.registry.registry import Registry, version_number_text
from tasks.registry.releases import FORMER_CHAMPION_TAG, UNPUBLISHED_TAG
from tests.tasks.registration import RecordingPublisher


@pytest.fixture
def registry(workspace: Path) -> Registry:
    """A registry of a model with versions 1 to 3. Version 1 is champion."""
    registry = Registry.connect(workspace, "m", publishers=[RecordingPublisher()])
    registry.client.create_registered_model("m")
    for number in range(1, 4):
        registry.client.create_model_version("m", f"file://{workspace}/{number}")
    registry.client.set_registered_model_alias("m", "champion", "1")
    return registry


def published_moves(registry: Registry) -> list[tuple[str, str | None, str | None]]:
    """Return alias, old version and new version of each published change."""
    (publisher,) = registry.publishers
    assert isinstance(publisher, RecordingPublisher)
    return publisher.moves()


def test_a_promotion_moves_the_alias_marks_the_former_champion_and_is_published(registry: Registry) -> None:
    assert registry.move_champion(registry.version(2), expected_champion=registry.version(1), reason="better")
    assert version_number_text(registry.champion()) == "2"
    assert [version_number_text(version) for version in registry.former_champions()] == ["1"]
    assert published_moves(registry) == [("champion", "1", "2")]


def test_the_first_former_champion_is_the_version_that_was_replaced_last(registry: Registry) -> None:
    assert registry.move_champion(registry.version(2), expected_champion=registry.version(1), reason="better")
    registry.set_tag(registry.version(1), FORMER_CHAMPION_TAG, "4000000000")  # in 2096, as from a wrong clock
    assert registry.move_champion(registry.version(3), expected_champion=registry.version(2), reason="better")
    assert [version_number_text(version) for version in registry.former_champions()] == ["2", "1"]
    assert registry.move_champion(registry.version(1), expected_champion=registry.version(3), reason="rollback")
    assert [version_number_text(version) for version in registry.former_champions()] == ["3", "2", "1"]


def test_a_version_that_was_not_compared_with_the_current_champion_is_not_promoted(registry: Registry) -> None:
    assert not registry.move_champion(registry.version(3), expected_champion=registry.version(2), reason="better")
    assert not registry.move_champion(registry.version(3), expected_champion=None, reason="first")
    assert (version_number_text(registry.champion()), registry.former_champions(), published_moves(registry)) == ("1", [], [])


def test_only_one_of_two_concurrent_moves_of_an_alias_succeeds(
    registry: Registry, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other_registry = Registry.connect(workspace, "m", publishers=[RecordingPublisher()])
    pauses_s: list[float] = []

    def move_alias_as_other_process(seconds: float) -> None:
        pauses_s.append(seconds)
        if len(pauses_s) == 1:  # both processes have read version 1, and the other process sets the alias last
            other_registry.client.set_registered_model_alias("m", "champion", "3")

    monkeypatch.setattr(registry_module.time, "sleep", move_alias_as_other_process)
    assert not registry.move_champion(registry.version(2), expected_champion=registry.version(1), reason="better")
    assert (version_number_text(registry.champion()), published_moves(registry)) == ("3", [])
    # The new version is compared again, with version 3.
    assert registry.move_champion(registry.version(2), expected_champion=registry.version(3), reason="better than 3")
    assert published_moves(registry) == [("champion", "3", "2")]


def test_each_move_or_removal_of_the_challenger_is_one_change(registry: Registry) -> None:
    for version in (registry.version(2), registry.version(2), registry.version(3), None, None):
        registry.move_challenger(version, reason="not better")
    assert published_moves(registry) == [("challenger", None, "2"), ("challenger", "2", "3"), ("challenger", "3", None)]
    assert registry.aliases() == {"champion": "1"}


@pytest.mark.parametrize("next_move", ["resume", "next champion", "next challenger"])
def test_the_next_move_publishes_the_move_of_a_killed_process(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, next_move: str
) -> None:
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(registry_module.time, "sleep", Mock(side_effect=KeyboardInterrupt))
        registry.move_champion(registry.version(2), expected_champion=registry.version(1), reason="better")
    assert (registry.aliases(), published_moves(registry)) == ({"champion": "2"}, [])
    (publisher,) = registry.publishers
    assert isinstance(publisher, RecordingPublisher)
    expected_changes = [AliasChange("m", "champion", "1", "2", "better", is_late=True)]
    for _ in range(2):  # the second call publishes nothing
        if next_move == "resume":
            assert registry.move_champion(registry.version(2), expected_champion=registry.version(2), reason="better")
        elif next_move == "next challenger":
            registry.move_challenger(registry.version(3), reason="worse")
        else:
            registry.move_champion(registry.version(3), expected_champion=registry.version(2), reason="best")
    if next_move != "resume":
        alias, old_version, reason = (
            ("champion", "2", "best") if next_move == "next champion" else ("challenger", None, "worse")
        )
        expected_changes.append(AliasChange("m", alias, old_version, "3", reason))
    assert publisher.changes == expected_changes


def test_a_completed_move_of_a_process_without_publishers_is_not_published_later(registry: Registry, workspace: Path) -> None:
    silent_registry = Registry.connect(workspace, "m")
    assert silent_registry.move_champion(registry.version(2), expected_champion=registry.version(1), reason="better")
    assert registry.move_champion(registry.version(3), expected_champion=registry.version(2), reason="best")
    assert published_moves(registry) == [("champion", "2", "3")]
    assert not any(UNPUBLISHED_TAG in registry.version(number).tags for number in range(1, 4))
