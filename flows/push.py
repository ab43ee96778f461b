"""Push of a registered version to the vector stores of `delivery`, after each run and with `nightjar push`."""

import logging
from typing import TYPE_CHECKING

from filelock import FileLock

from flows.settings.pipeline import PipelineConfig
from recsys_core.errors import InputError, NightjarError
from tasks import delivery
from tasks.registry.loading import load_version

if TYPE_CHECKING:
    from tasks.delivery.push import PushResult

LOG = logging.getLogger("nightjar")
LOCK_NAME = "push.lock"


def push_version(config: PipelineConfig, *, version: str = "champion") -> tuple[list["PushResult"], list[str]]:
    """Push a version to each store of the config. Return the results, and one sentence for each store that failed.

    A second push in the same workspace waits for the first.

    Args:
        version: number or alias of the version.

    Raises:
        InputError: the config has no store, a library is missing, or there is no such version.
        StageError: the version does not load.
        TrackingServerError: MLflow does not work.
    """
    if not config.delivery.stores:
        raise InputError("the config has no vector store; add one to delivery.stores, e.g. {kind: lancedb, folder: vectors}")
    config.delivery.require_libraries()
    model_name = config.registry.model_name
    with FileLock(config.workspace.absolute() / LOCK_NAME):
        retriever = load_version(config.workspace.absolute(), model_name=model_name, version=version).retriever
        return delivery.push.push_to_all(retriever, config.delivery.stores, model_name=model_name)


def push_champion(config: PipelineConfig) -> str | None:
    """Push the champion to each store of the config. Return why a store did not get the champion; None if there is no error.

    A store that already has the champion is only checked. A failed push is repeated after the next run.
    """
    if not config.delivery.stores:
        return None
    try:
        results, alarms = push_version(config)
    except Exception as error:  # any error of a library
        problem = str(error) if isinstance(error, NightjarError) else f"{type(error).__name__}: {error}"
        results, alarms = [], [f"the champion was not pushed: {problem}"]
    for result in results:
        LOG.info("%s", result)
    for alarm in alarms:
        LOG.warning("%s", alarm)
    return "; ".join(alarms) or None
