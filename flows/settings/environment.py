"""Environment variables and log settings that must be set before Prefect or MLflow is imported."""

import logging
import os
import re
import tempfile
import warnings
from pathlib import Path

from recsys_core.errors import InputError
from recsys_core.units import DAY_S


def prepare_environment(workspace: Path) -> None:
    """Set the environment variables for Prefect's folder and for the log levels of Prefect and MLflow.

    Variables that the user has set keep their values. Call this function before a flow is imported.

    Raises InputError if `workspace` is not writable, or if the user has no home folder.
    """
    require_home()
    require_writable(workspace)
    workspace.mkdir(parents=True, exist_ok=True)
    default_by_variable = {
        "PREFECT_HOME": str((workspace / "prefect").absolute()),
        # Prefect's messages are in its log and its UI, not in the terminal.
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
        "PREFECT_LOGGING_INTERNAL_LEVEL": "CRITICAL",
        "MLFLOW_LOGGING_LEVEL": "WARNING",
    }
    for variable, value in default_by_variable.items():
        os.environ.setdefault(variable, value)


def set_flow_run_retention(*, num_days: int) -> None:
    """Set the environment variables so that a Prefect server of this process deletes flow runs after `num_days` days.

    Variables that the user has set keep their values.
    """
    default_by_variable = {
        "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,flow_runs",
        "PREFECT_SERVER_SERVICES_DB_VACUUM_RETENTION_PERIOD": str(num_days * DAY_S),
    }
    for variable, value in default_by_variable.items():
        os.environ.setdefault(variable, value)


def require_home() -> None:
    """Raise InputError if the user has no home folder, which Prefect needs. A container may run with an unknown user id."""
    try:
        Path.home()
    except RuntimeError:
        raise InputError(
            f"the user id {os.getuid()} has no home folder, but Prefect needs one: set HOME to a folder that this "
            "user can write"
        ) from None


def require_writable(workspace: Path) -> None:
    """Raise InputError if `workspace` is not writable, or does not exist and cannot be created. Create nothing."""
    if special_text := re.search(r"\?|%[0-9A-Fa-f]{2}", str(workspace.absolute())):
        raise InputError(
            f"workspace {workspace.absolute()}: the path contains {special_text[0]}, which has a special meaning in the "
            "addresses of the workspace's databases; set workspace to another folder"
        )
    try:
        nearest_existing_path = next(path for path in (workspace, *workspace.parents) if os.path.lexists(path))
        if not nearest_existing_path.is_dir():
            raise InputError(f"workspace {workspace}: {nearest_existing_path} is not a folder; set workspace to a folder")
        with tempfile.TemporaryFile(dir=nearest_existing_path):
            pass
    except OSError as error:
        raise InputError(
            f"workspace {workspace}: cannot be written: {error.strerror}; check its permissions, or set another workspace"
        ) from None


def silence_libraries() -> None:
    """Silence log messages and warnings of libraries. Call this function before the libraries are imported."""
    logging.raiseExceptions = False  # Prefect would print an error for each record that its server does not accept
    # Logging through an unconfigured root logger would install a handler that prints to stderr.
    logging.getLogger().addHandler(logging.NullHandler())
    # TorchRec traces the model with torch.fx, which logs a warning about a function of TorchRec.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
