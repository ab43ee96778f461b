"""All stages by name, imported at first use: the ingests do not need torch, FAISS and MLflow, which take seconds to import."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tasks.data_report import check_data as check_data
    from tasks.evaluate import evaluate as evaluate
    from tasks.export import export_vectors as export_vectors
    from tasks.index import build_index as build_index
    from tasks.ingest import ingest_embeddings as ingest_embeddings
    from tasks.ingest import ingest_features as ingest_features
    from tasks.ingest import ingest_interactions as ingest_interactions
    from tasks.package import build_package as build_package
    from tasks.plan import plan_sharding as plan_sharding
    from tasks.register import register as register
    from tasks.train import train as train

_MODULES = {
    "ingest_embeddings": "ingest",
    "ingest_interactions": "ingest",
    "ingest_features": "ingest",
    "check_data": "data_report",
    "plan_sharding": "plan",
    "train": "train",
    "export_vectors": "export",
    "evaluate": "evaluate",
    "build_index": "index",
    "build_package": "package",
    "register": "register",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__} has no stage {name!r}; there are {', '.join(_MODULES)}")
    return getattr(import_module(f"tasks.{_MODULES[name]}"), name)
