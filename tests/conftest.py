"""What tests of several folders share."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("only root may mount a file system")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)  # a map of it may live on in a traceback
