"""The command line. The listed modules import NumPy, Prefect or MLflow, so a command imports them when it uses them."""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flows.cli import deploy, experiments, plan, registry, run, session, ui, workspace

__all__ = ["deploy", "experiments", "plan", "registry", "run", "session", "ui", "workspace"]


def __getattr__(name: str) -> ModuleType:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.{name}")
