"""Registration with a real MLflow server, which checks requests more strictly than the embedded database."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.registry.mlflow_client import connect
from tasks.registry.releases import champion_of
from tests.drills.restartable_server import mlflow_server, running
from tests.tasks.conftest import Stages
from tests.tasks.registration import prepare_run, register_version


@pytest.mark.drill
def test_a_version_is_registered_tested_and_promoted_on_a_server(
    tmp_path: Path, build_stages: Callable[..., Stages], monkeypatch: pytest.MonkeyPatch
) -> None:
    context = prepare_run(tmp_path / "workspace", "one")
    with running(mlflow_server(tmp_path)) as server:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", server.address)
        registration = register_version(build_stages(), context)
        assert (registration.version, registration.alias) == ("1", "champion")
        champion = champion_of(connect(context.run.workspace), "m")
        assert champion is not None and str(champion.version) == "1"
    assert not (context.run.workspace / "mlflow.db").exists()
