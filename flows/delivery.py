"""Delivery of the champion to other systems: after each run, and the flow `recommend`.

A version stays champion whether its delivery succeeds or not.
"""

import logging

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed

from flows.prefect_runs import ConfigPath, Overrides, fail_run_with_unknown_parameters, load_form_config, name_flow_run
from flows.push import push_champion
from flows.query import recommend_many, recommendation_settings
from flows.settings.pipeline import PipelineConfig
from recsys_core.errors import InputError, NightjarError, first_line
from recsys_core.termination import die_with_parent
from tasks import delivery
from tasks.progress.reporting import StageLog
from tasks.registry.loading import version_number_with_alias

LOG = logging.getLogger("nightjar")


def deliver(config: PipelineConfig) -> list[str]:
    """Deliver the champion to each receiver in `delivery` that has another version. Return the errors, which are also logged.

    A failed delivery is therefore repeated after the next run.
    """
    problems = [_write_recommendations(config), push_champion(config)]
    return [problem for problem in problems if problem is not None]


def _write_recommendations(config: PipelineConfig) -> str | None:
    """Write the recommendations for many users, unless the folder already has them; return the error, if any."""
    folder = config.delivery.recommendations.folder
    if folder is None:
        return None
    try:
        model_name = config.registry.model_name
        champion_version = version_number_with_alias(config.workspace.absolute(), model_name=model_name)
        settings = recommendation_settings(config, model_name=model_name)
        if champion_version is None or delivery.recommendations.is_written(folder, version=champion_version, settings=settings):
            return None
        stage_log = StageLog("recommend")
        summary = recommend_many(config, folder=folder)
    except Exception as error:  # any error of a library
        reason = str(error) if isinstance(error, NightjarError) else f"{type(error).__name__}: {first_line(error)}"
        problem = f"the recommendations in {folder} do not come from the champion: {reason}; repeat nightjar recommend"
        LOG.error(problem)
        return problem
    stage_log.finish_step(summary.text)
    return None


@flow(name="recommend", validate_parameters=True, on_crashed=[fail_run_with_unknown_parameters])
def recommend(pipeline: ConfigPath, overrides: Overrides = ()) -> State:
    """Write the champion's recommendations for many users to parquet files, with the settings `delivery.recommendations`.

    Args:
        pipeline: Path of the config file on the worker.
        overrides: Settings that differ from the config file, as key=value, for example delivery.recommendations.k=20.

    Returns:
        The end state Completed.

    Raises:
        InputError: the config or a file is invalid, or there is no champion. The earlier recommendations stay.
        StageError: the champion does not load, or MLflow does not work. The earlier recommendations stay.
    """
    die_with_parent()  # has an effect only under `nightjar up`
    config = load_form_config(pipeline, overrides)
    name_flow_run(config.name, "recommend")
    folder = config.delivery.recommendations.folder
    if folder is None:
        raise InputError("delivery.recommendations.folder is not set; set it to the folder for the files")
    summary = recommend_many(config, folder=folder)
    return Completed(message=f"{folder}: {summary.text}")
