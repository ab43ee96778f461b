"""The functions behind the commands. They import NumPy, Prefect or MLflow, so each module is imported on first use."""

from typing import TYPE_CHECKING

from recsys_core.imports import lazy_modules

if TYPE_CHECKING:
    from flows.cli.commands import deploy, experiments, plan, registry, run, session, ui, workspace

__all__ = ["deploy", "experiments", "plan", "registry", "run", "session", "ui", "workspace"]
__getattr__ = lazy_modules(__name__, __all__)
