"""Delivery of a new champion to other systems. The version is champion whether the delivery succeeds or not."""

import logging

from flows.query import load_retriever, recommend_many
from flows.settings.pipeline import PipelineConfig
from recsys_core.errors import NightjarError, first_line
from tasks.progress.reporting import StageLog

LOG = logging.getLogger("nightjar")


def deliver(config: PipelineConfig) -> str | None:
    """Deliver the champion with the settings `delivery`. Log an error, and return it as one sentence; None without an error."""
    folder = config.delivery.recommendations.folder
    if folder is None:
        return None
    step = StageLog("recommend")
    try:
        summary = recommend_many(config, load_retriever(config), folder=folder)
    except Exception as error:  # any error of a library
        reason = str(error) if isinstance(error, NightjarError) else f"{type(error).__name__}: {first_line(error)}"
        problem = f"the recommendations in {folder} are not those of the new champion: {reason}; repeat nightjar recommend"
        LOG.error(problem)
        return problem
    step.finish_step(summary.text)
    return None
