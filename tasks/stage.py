"""The decorator for the stages of a run: it makes a stage a Prefect task, logs one line, and ends the run after `Run.until`."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar, cast

from prefect import task
from prefect.cache_policies import NO_CACHE

from recsys_core.manifests import Manifest
from tasks.reporting import begin_stage
from tasks.run import Run, StageName

P = ParamSpec("P")
M = TypeVar("M", bound=Manifest | None)


class StoppedEarly(Exception):
    """The run has completed the stage that `Run.until` names."""

    def __init__(self, stage: StageName) -> None:
        super().__init__(stage)
        self.stage = stage


def stage(name: StageName) -> Callable[[Callable[P, tuple[M, str]]], Callable[P, M]]:
    """Run the decorated function as the Prefect task `name` and log its result in one line.

    The function has the keyword argument `run`. It returns its manifest and a short text for the log; the manifest is None if
    the stage has nothing to do. The decorated function returns only the manifest, or raises StoppedEarly if the stage is
    `run.until`.
    """

    def decorate(function: Callable[P, tuple[M, str]]) -> Callable[P, M]:
        @task(name=name, cache_policy=NO_CACHE)
        @wraps(function)
        def as_task(*args: P.args, **kwargs: P.kwargs) -> M:
            finish = begin_stage(name)
            manifest, facts = function(*args, **kwargs)
            finish(manifest, facts)
            return manifest

        @wraps(function)
        def run_stage(*args: P.args, **kwargs: P.kwargs) -> M:
            manifest = as_task(*args, **kwargs)
            # Not raised in the task, because Prefect would mark the task as failed.
            if cast(Run, kwargs["run"]).until == name:
                raise StoppedEarly(name)
            return manifest

        run_stage.fn = function  # type: ignore[attr-defined]  # the function without Prefect, as in Prefect's own tasks
        return run_stage

    return decorate
