"""Registration with a real MLflow server, which checks requests more strictly than the embedded database."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.registry.config import RegistryConfig
from tasks.registry.mlflow_client import connect
from tasks.registry.releases import champion_uri
from tasks.runs.run import Run
from tasks.stages.register import register
from tests.drills.restartable_server import mlflow_server, running
from tests.tasks.conftest import Stages


@pytest.mark.drill
def test_a_version_is_registered_tested_and_promoted_on_a_server(
    tmp_path: Path, stages: Callable[..., Stages], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run("one", workspace=tmp_path / "workspace", experiment="tests")
    run.folder.mkdir(parents=True)
    run.config_file.write_text("name: tests\n")
    with running(mlflow_server(tmp_path)) as server:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", server.address)
        registration = register.fn(RegistryConfig(model_name="m"), run=run, **stages()._asdict())
        assert (registration.version, registration.alias) == ("1", "champion")
        assert champion_uri(connect(run.workspace), "m") == "models:/m/1"
    assert not (run.workspace / "mlflow.db").exists()
