"""All stages by name, imported at first use: the ingests do not need torch, FAISS and MLflow, which take seconds to import."""

from typing import TYPE_CHECKING

from recsys_core.lazy_imports import lazy_attributes

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

__getattr__ = lazy_attributes(
    __name__,
    {
        "ingest_embeddings": "tasks.ingest",
        "ingest_interactions": "tasks.ingest",
        "ingest_features": "tasks.ingest",
        "check_data": "tasks.data_report",
        "plan_sharding": "tasks.plan",
        "train": "tasks.train",
        "export_vectors": "tasks.export",
        "evaluate": "tasks.evaluate",
        "build_index": "tasks.index",
        "build_package": "tasks.package",
        "register": "tasks.register",
    },
)
