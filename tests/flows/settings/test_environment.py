"""The environment of a command: the home folder."""

from pathlib import Path

import pytest

from flows.servers.prefect_server import embedded_server
from flows.settings.environment import prepare_environment
from recsys_core.errors import InputError


def test_a_user_without_a_home_folder_gets_one_sentence_before_a_server_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_home() -> Path:  # as in a container with an unknown user id and without HOME
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    message = r"^the user id \d+ has no home folder, but Prefect needs one: set HOME to a folder that this user can write$"
    with pytest.raises(InputError, match=message):
        prepare_environment(tmp_path / "workspace")
    with pytest.raises(InputError, match=message), embedded_server():
        pass
    assert list(tmp_path.iterdir()) == []
