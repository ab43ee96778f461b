"""Fixtures that several folders use, and the order of the test files."""

import gc
import subprocess
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

hypothesis.settings.register_profile("nightjar", deadline=None)  # no test depends on how long the code takes
hypothesis.settings.load_profile("nightjar")
gc.disable()  # until all test modules are imported, as in recsys_core.imports.fast_imports
SLOW_FOLDERS = ("training", "flows", "tasks", "infra")
"""Folders whose tests start processes."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the slow folders first, because a worker that starts a slow file last keeps the other workers waiting."""
    items.sort(
        key=lambda item: next(
            (folder_index for folder_index, name in enumerate(SLOW_FOLDERS) if name in item.path.parts), len(SLOW_FOLDERS)
        )
    )


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """The mount point of an empty file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, check=False)
    if mount.returncode:
        pytest.skip("only root may mount a file system")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)  # lazy, because a traceback may still map a file


@pytest.fixture(scope="session")
def new_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path of an empty MLflow database. Tests copy the file because creating a database takes seconds."""
    from tasks.registry.mlflow_client import connect

    folder = tmp_path_factory.mktemp("mlflow")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        connect(folder)
    return folder / "mlflow.db"
