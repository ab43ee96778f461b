"""The decorator that makes a function a stage of a run: a Prefect task, a log line, and the end of the run at `Run.until`."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar, cast

from prefect import task
from prefect.cache_policies import NO_CACHE

from recsys_core.manifests import Manifest
from tasks.reporting import begin
from tasks.run import Run, StageName

P = ParamSpec("P")
M = TypeVar("M", bound=Manifest | None)


class StoppedEarly(Exception):
    """The run has completed the stage that `Run.until` names."""

    def __init__(self, stage: StageName) -> None:
        super().__init__(stage)
        self.stage = stage


def stage(name: StageName) -> Callable[[Callable[P, tuple[M, str]]], Callable[P, M]]:
    """Run the decorated function as the Prefect task `name` and log what it did in one line.

    The function takes the keyword argument `run` and returns its manifest with a few words for the log. The result is the
    manifest, None for a stage that has nothing to do. Raises StoppedEarly after the stage that `run.until` names.
    """

    def decorate(function: Callable[P, tuple[M, str]]) -> Callable[P, M]:
        @task(name=name, cache_policy=NO_CACHE)
        @wraps(function)
        def as_task(*args: P.args, **kwargs: P.kwargs) -> M:
            finish = begin(name)
            manifest, facts = function(*args, **kwargs)
            finish(manifest, facts)
            return manifest

        @wraps(function)
        def run_stage(*args: P.args, **kwargs: P.kwargs) -> M:
            manifest = as_task(*args, **kwargs)
            # In the flow, not in the task: a task that raises counts as failed.
            if cast(Run, kwargs["run"]).until == name:
                raise StoppedEarly(name)
            return manifest

        run_stage.fn = function  # type: ignore[attr-defined]  # as Prefect's own tasks: the function without Prefect
        return run_stage

    return decorate
