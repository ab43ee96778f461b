"""The stages of a run. A stage is imported when it is first used, because torch, MLflow and FAISS take seconds to import."""

from typing import TYPE_CHECKING, Any

from recsys_core.imports import fast_imports, lazy_attributes

if TYPE_CHECKING:
    from tasks.stages.data_report import check_data as check_data
    from tasks.stages.data_stages import ingest as ingest
    from tasks.stages.model_stages import build_index as build_index
    from tasks.stages.model_stages import build_package as build_package
    from tasks.stages.model_stages import evaluate as evaluate
    from tasks.stages.model_stages import export_vectors as export_vectors
    from tasks.stages.model_stages import plan_sharding as plan_sharding
    from tasks.stages.model_stages import train as train
    from tasks.stages.registration import register as register

_import_stage = lazy_attributes(
    __name__,
    {
        "ingest": "tasks.stages.data_stages",
        "check_data": "tasks.stages.data_report",
        "plan_sharding": "tasks.stages.model_stages",
        "train": "tasks.stages.model_stages",
        "export_vectors": "tasks.stages.model_stages",
        "evaluate": "tasks.stages.model_stages",
        "build_index": "tasks.stages.model_stages",
        "build_package": "tasks.stages.model_stages",
        "register": "tasks.stages.registration",
    },
)


def __getattr__(name: str) -> Any:
    """Import a stage. Later uses of the stage do not call this function."""
    with fast_imports():
        globals()[name] = stage = _import_stage(name)
    return stage
