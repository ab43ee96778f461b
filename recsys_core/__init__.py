"""The library of nightjar: data, model, sharding, training, evaluation, index and serving.

It imports neither an orchestrator nor an experiment tracker, so every function can be called from a notebook.
"""

from typing import TYPE_CHECKING

from recsys_core.imports import lazy_attributes

if TYPE_CHECKING:
    from recsys_core.dataset.events import EventStore as EventStore
    from recsys_core.manifests import Dataset as Dataset
    from recsys_core.serving.retriever import Retriever as Retriever

__version__ = "0.1.0"

__getattr__ = lazy_attributes(
    __name__,
    {
        "Dataset": "recsys_core.manifests",
        "EventStore": "recsys_core.dataset.events",
        "Retriever": "recsys_core.serving.retriever",
    },
)
