"""The stages of a run. A module is imported on first use, because torch, MLflow and FAISS take seconds to import."""

from typing import TYPE_CHECKING

from recsys_core.imports import lazy_modules

if TYPE_CHECKING:
    from tasks.stages import data_report, data_stages, model_stages, refit, registration

__all__ = ["data_report", "data_stages", "model_stages", "refit", "registration"]
__getattr__ = lazy_modules(__name__, __all__)
