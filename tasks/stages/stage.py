"""Decorator of the stages of a run: it logs the result of a stage, and adds the manifest to the results of the run."""

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, Generic, ParamSpec, TypeVar

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.context import FlowRunContext

from recsys_core.manifests import Manifest
from recsys_core.termination import raise_interrupts
from tasks.progress.reporting import StageLog
from tasks.runs.context import StageContext

P = ParamSpec("P")
ManifestT = TypeVar("ManifestT", bound=Manifest)
StageFunction = Callable[Concatenate[StageContext, P], tuple[ManifestT | None, str]]


class StoppedEarly(Exception):
    """The run has completed the stage that `StageContext.until` names."""

    def __init__(self, stage_name: str) -> None:
        super().__init__(stage_name)
        self.stage = stage_name


class Stage(Generic[P, ManifestT]):
    """A stage of a run. A call runs the function and returns the manifest. In a flow, the call is a Prefect task.

    Attributes:
        manifest_type: type of the manifest, which declares the name of the stage.
        function: returns the manifest and a summary for the log. The manifest is None if the stage has no result.
    """

    def __init__(self, manifest_type: type[ManifestT], function: StageFunction[P, ManifestT]) -> None:
        self.manifest_type, self.function = manifest_type, function
        wraps(function)(self)

    def __call__(self, context: StageContext, *args: P.args, **kwargs: P.kwargs) -> ManifestT | None:
        """Run the stage; raise StoppedEarly if `context.until` names it."""
        task_decorator = task(name=self.manifest_type.stage, cache_policy=NO_CACHE)
        run_stage = self.run if FlowRunContext.get() is None else task_decorator(self.run)
        manifest = run_stage(context, *args, **kwargs)
        # The exception is raised outside of the task, because Prefect would mark the task as failed.
        if context.until == self.manifest_type.stage:
            raise StoppedEarly(context.until)
        return manifest

    def run(self, context: StageContext, *args: P.args, **kwargs: P.kwargs) -> ManifestT | None:
        """Run the function, log its summary, and add its manifest to the results of the run."""
        log = StageLog(self.manifest_type.stage)
        with raise_interrupts():
            manifest, summary = self.function(context, *args, **kwargs)
        if manifest is not None:
            context.results.add(manifest)
        return log.finish(manifest, summary)


def stage(manifest_type: type[ManifestT]) -> Callable[[StageFunction[P, ManifestT]], Stage[P, ManifestT]]:
    """Return a decorator that makes a function the stage of `manifest_type`."""
    return lambda function: Stage(manifest_type, function)
