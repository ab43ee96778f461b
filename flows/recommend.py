"""The flow `recommend`: the champion's recommendations for many users, as parquet files."""

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed

from flows.prefect_runs import ConfigPath, Overrides, load_form_config, name_flow_run, name_unknown_parameters
from flows.query import load_retriever, recommend_many
from recsys_core.errors import InputError
from recsys_core.parent_process import die_with_parent


@flow(name="recommend", validate_parameters=True, on_crashed=[name_unknown_parameters])
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
    summary = recommend_many(config, load_retriever(config), folder=folder)
    return Completed(message=f"{folder}: {summary.text}")
