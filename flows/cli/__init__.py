"""The command line. The listed modules import NumPy, Prefect or MLflow, so a command imports them when it uses them."""

from typing import TYPE_CHECKING

from recsys_core.imports import lazy_modules

if TYPE_CHECKING:
    from flows.cli import deploy, experiments, plan, registry, run, session, ui, workspace

__all__ = ["deploy", "experiments", "plan", "registry", "run", "session", "ui", "workspace"]
__getattr__ = lazy_modules(__name__, __all__)
