"""The library of nightjar: data, model, sharding, training, evaluation, index and serving.

It imports neither an orchestrator nor an experiment tracker, so every function can be called from a notebook.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recsys_core.data.events import EventStore as EventStore
    from recsys_core.manifests import Dataset as Dataset
    from recsys_core.serving.retriever import Retriever as Retriever

__version__ = "0.1.0"

_MODULES = {
    "Dataset": "recsys_core.manifests",
    "EventStore": "recsys_core.data.events",
    "Retriever": "recsys_core.serving.retriever",
}


def __getattr__(name: str) -> Any:
    """Import a class on its first use: the imports of torch and FAISS take seconds."""
    from importlib import import_module

    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
