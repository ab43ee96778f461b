"""Flow `refresh`: the champion's model with the current items, as a new version, in minutes and without a training."""

from prefect import flow, runtime
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from flows.delivery import deliver
from flows.prefect_runs import ConfigPath, Overrides, fail_run_with_unknown_parameters, load_form_config, name_flow_run
from recsys_core.errors import StageError
from recsys_core.termination import die_with_parent
from tasks.delivery.publishers import publishers_of
from tasks.registry.registry import Registry


@flow(name="refresh", validate_parameters=True, on_crashed=[fail_run_with_unknown_parameters])
def refresh(pipeline: ConfigPath, overrides: Overrides = ()) -> State:
    """Add the new items of the vector files and of the item table to the champion, and remove items that are no longer there.

    The new version has the model of the champion. It becomes champion if it passes the checks, and is then delivered like the
    champion of a run.

    Args:
        pipeline: Path of the config file on the worker.
        overrides: Settings that differ from the config file, as key=value, for example refresh.max_removed_share=0.5.

    Returns:
        The end state: Promoted; Unchanged if no item has changed; Refused, which is a failure, if a check failed.

    Raises:
        InputError: there is no champion, the config or the tables are invalid, or the tables do not fit the champion's model.
        StageError: the champion does not load, or its package has another format.
    """
    from tasks.refresh.refreshed_version import refresh_champion  # imports torch, FAISS and DuckDB

    die_with_parent()  # has an effect only under `nightjar up`
    config = load_form_config(pipeline, overrides)
    name_flow_run(config.name, "refresh")
    workspace, model_name = config.workspace.absolute(), config.registry.model_name
    publishers = publishers_of(runtime.flow_run.id, config.name, run_reason="refresh", run_id=None)
    registry = Registry.connect(workspace, model_name, publishers=publishers)
    refreshed_version = refresh_champion(
        config.refresh, config.input_config, registry, workspace=workspace, pipeline=config.name
    )
    if refreshed_version is None:
        return Completed(name="Unchanged", message="no item has changed, so no version is registered")
    version_text = (
        f"{model_name} version {refreshed_version.version}, refreshed from version {refreshed_version.parent} "
        f"({refreshed_version.changes_text})"
    )
    if refreshed_version.problems:
        error = StageError(f"{version_text}, does not become champion: {'; '.join(refreshed_version.problems)}")
        return Failed(name="Refused", message=str(error), data=error)
    delivery_problems = deliver(config)
    return Completed(
        name="Promoted",
        message="; ".join([f"{version_text}, is champion; changed vectors: {refreshed_version.delta_uri}", *delivery_problems]),
    )
