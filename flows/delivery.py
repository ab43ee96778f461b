"""Delivery of a new champion to other systems. The version is champion whether the delivery succeeds or not."""

import logging

from flows.push import push_champion
from flows.query import load_retriever, recommend_many
from flows.settings.pipeline import PipelineConfig
from recsys_core.errors import NightjarError, first_line
from tasks.progress.reporting import StageLog

LOG = logging.getLogger("nightjar")


def deliver(config: PipelineConfig, *, is_new_champion: bool) -> list[str]:
    """Deliver the champion with the settings `delivery`. Log each error, and return it as one sentence.

    The vector stores also get a champion that they do not have yet, for example after an earlier error.
    """
    problems = [_write_recommendations(config) if is_new_champion else None, push_champion(config)]
    return [problem for problem in problems if problem is not None]


def _write_recommendations(config: PipelineConfig) -> str | None:
    """Write the recommendations for many users; return the error as one sentence."""
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
