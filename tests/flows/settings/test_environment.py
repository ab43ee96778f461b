"""The environment of a command: the home folder, and paths that no database address can contain."""

import re
from pathlib import Path

import pytest

from flows.servers.prefect_server import embedded_server
from flows.settings.environment import prepare_environment
from recsys_core.errors import InputError


def test_a_user_without_a_home_folder_gets_one_sentence_before_a_server_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_no_home() -> Path:  # as in a container with an unknown user id and without HOME
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", raise_no_home)
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    message = r"^the user id \d+ has no home folder, but Prefect needs one: set HOME to a folder that this user can write$"
    with pytest.raises(InputError, match=message):
        prepare_environment(tmp_path / "workspace")
    with pytest.raises(InputError, match=message), embedded_server():
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("folder_name", ["what?", "100%20"])
def test_a_workspace_that_no_database_address_can_contain_is_rejected(tmp_path: Path, folder_name: str) -> None:
    with pytest.raises(
        InputError, match=rf"^workspace {re.escape(str(tmp_path / folder_name))}: the path contains (\?|%20), which"
    ):
        prepare_environment(tmp_path / folder_name)
    assert list(tmp_path.iterdir()) == []
