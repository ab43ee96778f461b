"""The alias `champion` as a compare-and-set: real processes and threads on one real MLflow."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion

from tasks.registry import promotion
from tasks.registry.mlflow_client import connect
from tasks.registry.promotion import CHOOSING, TURN_TAG, move_champion
from tasks.registry.releases import former_champions

ROOT = Path(promotion.__file__).parents[1]
MOVER = """
import sys
from mlflow import MlflowClient
from tasks.registry.promotion import move_champion

client = MlflowClient(sys.argv[1])
old, new = (client.get_model_version("m", number) for number in ("1", sys.argv[2]))
print("ready", flush=True)
sys.stdin.readline()
print(move_champion(client, new, expected_champion=old, mark_as_former=True, turn_version=new))
"""


@pytest.fixture
def versions(workspace: Path) -> list[ModelVersion]:
    """Versions 1 to 4, of which the first is champion."""
    client = connect(workspace)
    client.create_registered_model("m")
    made = [client.create_model_version("m", f"file://{workspace}/{number}") for number in range(1, 5)]
    client.set_registered_model_alias("m", "champion", "1")
    return made


def champion(client: MlflowClient) -> str:
    return str(client.get_registered_model("m").aliases["champion"])


def test_of_processes_that_compared_with_the_same_champion_one_moves_the_alias(
    workspace: Path, versions: list[ModelVersion]
) -> None:
    command = [sys.executable, "-c", MOVER, f"sqlite:///{workspace}/mlflow.db"]
    movers = [
        subprocess.Popen([*command, number], cwd=ROOT, env=os.environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for number in ("2", "3")
    ]
    for mover in movers:
        assert mover.stdout is not None and mover.stdout.readline() == "ready\n"
    for mover in movers:
        assert mover.stdin is not None
        mover.stdin.write("\n")
        mover.stdin.flush()
    moved = [mover.communicate()[0].strip() for mover in movers]
    assert sorted(moved) == ["False", "True"]
    client = connect(workspace)
    assert champion(client) == ("2", "3")[moved.index("True")]
    assert [str(version.version) for version in former_champions(client, "m")] == ["1"]
    assert not [version for version in client.search_model_versions("name = 'm'") if TURN_TAG in version.tags]


def test_of_threads_that_compared_with_the_same_champion_one_moves_the_alias(
    workspace: Path, versions: list[ModelVersion]
) -> None:
    start, moved = threading.Barrier(3), dict[str, bool]()

    def move(version: ModelVersion) -> None:
        client = connect(workspace)
        start.wait()
        moved[str(version.version)] = move_champion(
            client, version, expected_champion=versions[0], mark_as_former=True, turn_version=version
        )

    threads = [threading.Thread(target=move, args=(version,)) for version in versions[1:]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(moved.values()) == [False, False, True]
    assert moved[champion(connect(workspace))]


@pytest.mark.parametrize("turn", [CHOOSING, "1"])
def test_the_promotion_of_a_process_that_died_is_skipped(
    workspace: Path, versions: list[ModelVersion], monkeypatch: pytest.MonkeyPatch, turn: str
) -> None:
    client = connect(workspace)
    client.set_model_version_tag("m", "2", TURN_TAG, turn)
    monkeypatch.setattr(promotion, "ABANDONED_S", 1.0)
    assert move_champion(client, versions[2], expected_champion=versions[0], mark_as_former=True, turn_version=versions[2])
    assert champion(client) == "3"


def test_a_skipped_promotion_does_not_move_the_alias(
    workspace: Path, versions: list[ModelVersion], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connect(workspace)
    read = promotion.champion_of

    def lose_the_turn(client: MlflowClient, model_name: str) -> ModelVersion | None:
        client.delete_model_version_tag("m", "2", TURN_TAG)  # as another process does after ABANDONED_S
        return read(client, model_name)

    monkeypatch.setattr(promotion, "champion_of", lose_the_turn)
    assert not move_champion(client, versions[1], expected_champion=versions[0], mark_as_former=True, turn_version=versions[1])
    assert champion(client) == "1"
