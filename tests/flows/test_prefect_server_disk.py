"""A disk that is too small for the Prefect server is rejected before the server starts."""

from pathlib import Path

import pytest

from flows.prefect_server import embedded_server
from recsys_core.errors import InputError


def test_the_embedded_prefect_server_is_not_started_on_a_disk_without_room(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setenv("PREFECT_HOME", str(small_disk / "prefect"))
    message = rf"^{small_disk}: the embedded Prefect server with its database takes at least 0\.031 GiB, but the disk has"
    with embedded_server() as server:
        assert server is not None
        with pytest.raises(InputError, match=message):
            server.begin(log_file=small_disk / "prefect.log")
    assert not (small_disk / "prefect").exists()
