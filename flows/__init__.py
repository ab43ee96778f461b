"""Prefect flows, the command line, and the Python API for notebooks.

>>> from flows import load_config, load_retriever, nightly_retrain, open_run
"""

from typing import TYPE_CHECKING

import tasks as _tasks  # noqa: F401  sets the environment that prefect reads when it is imported
from recsys_core.imports import lazy_attributes

if TYPE_CHECKING:
    from flows.nightly import nightly_retrain as nightly_retrain
    from flows.query import load_retriever as load_retriever
    from flows.runs.results import RunResults as RunResults
    from flows.runs.results import open_run as open_run
    from flows.runs.run_history import run_history as run_history
    from flows.settings.config_file import load_config as load_config
    from flows.settings.pipeline import PipelineConfig as PipelineConfig
    from flows.tuning import tune_settings as tune_settings
    from tasks.runs.context import RunOptions as RunOptions

__getattr__ = lazy_attributes(
    __name__,
    {
        "load_retriever": "flows.query",
        "PipelineConfig": "flows.settings.pipeline",
        "load_config": "flows.settings.config_file",
        "nightly_retrain": "flows.nightly",
        "RunOptions": "tasks.runs.context",
        "RunResults": "flows.runs.results",
        "open_run": "flows.runs.results",
        "run_history": "flows.runs.run_history",
        "tune_settings": "flows.tuning",
    },
)
