"""Flows `promote` and `rollback`: a person chooses the champion, on the command line or in the form of a deployment."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Annotated

from prefect import flow, runtime
from prefect.client.schemas.objects import State
from prefect.states import Completed
from pydantic import Field

from flows.delivery import deliver
from flows.prefect_runs import (
    ConfigPath,
    Overrides,
    fail_run_with_unknown_parameters,
    load_form_config,
    name_flow_run,
    titled_field,
)
from flows.runs.after_run import write_and_log_history_page
from flows.runs.run_history import run_history
from flows.settings.pipeline import PipelineConfig
from recsys_core.termination import die_with_parent
from tasks.delivery.publishers import publishers_of
from tasks.gate.by_hand import ManualDecision, promote_version, roll_back
from tasks.runs.context import MAX_REASON_CHARACTERS, StageContext

LOG = logging.getLogger("nightjar")
Reason = Annotated[str, titled_field("Reason"), Field(min_length=1, max_length=MAX_REASON_CHARACTERS)]


@flow(name="promote", validate_parameters=True, on_crashed=[fail_run_with_unknown_parameters])
def promote(
    pipeline: ConfigPath,
    version: Annotated[int, titled_field("Version"), Field(ge=1)],
    reason: Reason,
    overrides: Overrides = (),
) -> State:
    """Make a registered version the champion, without a comparison with the current champion.

    Args:
        pipeline: Path of the config file on the worker. The file names the registered model.
        version: Number of the version. It becomes champion if it passes the smoke test.
        reason: Why you promote this version, in one line. It becomes a tag of both versions.
        overrides: Settings that differ from the config file, as key=value, for example registry.model_name=films.

    Returns:
        The end state Promoted.

    Raises:
        InputError: the config, the version or the reason is invalid, or the version is already champion; nothing has changed.
        StageError: the version failed the smoke test, or MLflow does not work; nothing has changed.
    """
    return _change_champion(
        load_form_config(pipeline, overrides), reason, partial(promote_version, version), state_name="Promoted"
    )


@flow(name="rollback", validate_parameters=True, on_crashed=[fail_run_with_unknown_parameters])
def rollback(
    pipeline: ConfigPath,
    reason: Reason,
    version: Annotated[int, titled_field("Version"), Field(ge=0)] = 0,
    overrides: Overrides = (),
) -> State:
    """Give the alias champion back to a former champion.

    Args:
        pipeline: Path of the config file on the worker. The file names the registered model.
        reason: Why you withdraw the champion, in one line. It becomes a tag of both versions.
        version: Number of a former champion; 0 selects the newest former champion that can be loaded.
        overrides: Settings that differ from the config file, as key=value, for example registry.model_name=films.

    Returns:
        The end state RolledBack.

    Raises:
        InputError: the config or the reason is invalid, or the version is not a former champion; nothing has changed.
        StageError: no former champion can be loaded, or MLflow does not work; nothing has changed.
    """
    return _change_champion(
        load_form_config(pipeline, overrides), reason, partial(roll_back, version or None), state_name="RolledBack"
    )


def _change_champion(
    config: PipelineConfig, reason: str, move_alias: Callable[[ManualDecision], str], *, state_name: str
) -> State:
    """Move the alias with `move_alias`, deliver the new champion, and return the end state of the flow run."""
    die_with_parent()  # has an effect only under `nightjar up`
    name_flow_run(config.name, str(runtime.flow_run.flow_name), reason=reason)
    publishers = publishers_of(runtime.flow_run.id, config.name, run_reason=reason, run_id=None)
    message = move_alias(ManualDecision(config.registry, config.workspace.absolute(), reason, publishers))
    message = "; ".join((message, *deliver(config)))
    try:
        for past_run in run_history(config.workspace, max_runs=1):
            context = StageContext(past_run.run, experiment=config.registry.experiment)
            write_and_log_history_page(config, context)
    except Exception as error:  # any error of a library
        LOG.warning("could not write the page of the last runs (%s: %s); the champion has changed", type(error).__name__, error)
    return Completed(name=state_name, message=message)
