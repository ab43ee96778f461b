"""Fixtures that several folders use, and the order of the test files."""

import gc
import subprocess
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from filelock import FileLock

# No deadline, because no test depends on how long the code takes. Few examples per test, because the suite has many tests.
hypothesis.settings.register_profile("nightjar", deadline=None, max_examples=40)
hypothesis.settings.load_profile("nightjar")
gc.disable()  # imports are faster without garbage collection, as in recsys_core.imports.fast_imports
SLOW_FOLDERS = ("training", "flows", "tasks", "infra")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the slow folders to the beginning, so that no test process is busy with a slow file at the end."""
    items.sort(
        key=lambda item: next(
            (index for index, folder_name in enumerate(SLOW_FOLDERS) if folder_name in item.path.parts), len(SLOW_FOLDERS)
        )
    )


def pytest_collection_finish() -> None:
    """Exclude the imported modules from garbage collection, and turn it on."""
    gc.freeze()
    gc.enable()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """The mount point of a file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount_process = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, check=False)
    if mount_process.returncode:
        pytest.skip("only root may mount a file system")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)  # lazily, because a traceback may keep a memory map of a file open


@pytest.fixture(scope="session")
def new_database(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The path of an empty MLflow database that tests copy, because creating one takes seconds.

    The first test process that needs the database creates it for all test processes.
    """
    from tasks.registry.mlflow_client import connect

    base_folder = tmp_path_factory.getbasetemp()
    folder = (base_folder if worker_id == "master" else base_folder.parent) / "mlflow"
    with FileLock(f"{folder}.lock"), pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        if not folder.exists():
            unfinished_folder = tmp_path_factory.mktemp("mlflow")
            connect(unfinished_folder)
            unfinished_folder.rename(folder)  # so that no process uses an incomplete database if `connect` fails
    return folder / "mlflow.db"
