"""What has to be set before Prefect or MLflow is imported: an embedded home, a quiet console."""

import logging
import os
import tempfile
import warnings
from pathlib import Path

from recsys_core.errors import InputError


def prepare(workspace: Path, *, verbose: bool = False) -> None:
    """Embeds Prefect in `workspace` unless the user's own server or home is set. Call before importing flows.nightly."""
    require_writable(workspace)
    workspace.mkdir(parents=True, exist_ok=True)
    defaults = {
        "PREFECT_HOME": str((workspace / "prefect").absolute()),
        # The terminal is ours; Prefect's own view of the run is in its log and its UI.
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "INFO" if verbose else "CRITICAL",
        "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
        "MLFLOW_LOGGING_LEVEL": "INFO" if verbose else "WARNING",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def require_writable(workspace: Path) -> None:
    """InputError unless `workspace` is a folder, or can be made, and takes a file; leaves nothing behind."""
    try:
        there = next(path for path in (workspace, *workspace.parents) if os.path.lexists(path))
        if not there.is_dir():
            raise InputError(f"workspace {workspace}: {there} is no folder; set workspace to a folder")
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise InputError(
            f"workspace {workspace}: cannot be written: {error.strerror}; check its permissions, or set another"
        ) from None


def quieten() -> None:
    """Keeps libraries' remarks off a terminal that shows a run. Call before importing any of them."""
    # One that logs through the root logger before anyone has configured it makes it print everything.
    logging.getLogger().addHandler(logging.NullHandler())
    # TorchRec traces the model with torch.fx, which remarks on a function TorchRec calls.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
