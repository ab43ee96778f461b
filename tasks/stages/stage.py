"""The decorator for the stages of a run: it makes a stage a Prefect task, and ends the run after `Run.until`."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar, cast

from prefect import task
from prefect.cache_policies import NO_CACHE

from recsys_core.manifests import Manifest
from tasks.runs.run import Run, StageName

P = ParamSpec("P")
ResultT = TypeVar("ResultT", bound=Manifest | None)


class StoppedEarly(Exception):
    """The run has completed the stage that `Run.until` names."""

    def __init__(self, stage: StageName) -> None:
        super().__init__(stage)
        self.stage = stage


def stage(stage_name: StageName) -> Callable[[Callable[P, ResultT]], Callable[P, ResultT]]:
    """Run the decorated function as a Prefect task. Raise StoppedEarly after the stage that `run.until` names.

    The function has the keyword argument `run`, and returns its manifest, or None if the stage has no result.
    """

    def decorate(function: Callable[P, ResultT]) -> Callable[P, ResultT]:
        prefect_task = task(name=stage_name, cache_policy=NO_CACHE)(function)

        @wraps(function)
        def run_stage(*args: P.args, **kwargs: P.kwargs) -> ResultT:
            manifest = prefect_task(*args, **kwargs)
            # Not raised in the task, because Prefect would mark the task as failed.
            if cast(Run, kwargs["run"]).until == stage_name:
                raise StoppedEarly(stage_name)
            return manifest

        run_stage.fn = function  # type: ignore[attr-defined]  # the function without Prefect, as in Prefect's own tasks
        return run_stage

    return decorate
