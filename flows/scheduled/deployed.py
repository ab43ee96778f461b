"""The flow `nightly-retrain` with the parameters of the form in the Prefect UI. Deployments run this flow."""

from typing import Annotated

from prefect import flow, runtime
from prefect.client.schemas.objects import State
from pydantic import Field

from flows.nightly import nightly_retrain
from flows.prefect_runs import (
    ConfigPath,
    Overrides,
    end_lost_runs_of_deployment,
    fail_run_with_unknown_parameters,
    load_form_config,
    run_id_of_flow_run,
    titled_field,
)
from flows.runs.before_run import check_inputs, check_resume, choose_run_to_resume
from flows.scheduled.crash_report import end_with_worker
from recsys_core.disk import explain_disk_full
from recsys_core.errors import StageError, TrackingServerError
from recsys_core.manifests import StageName
from recsys_core.termination import die_with_parent
from tasks.runs.context import MAX_REASON_CHARACTERS, Promote, RunOptions, StageContext
from tasks.runs.workspace import Workspace

SCHEDULED_TAG = "auto-scheduled"
"""Tag with which Prefect marks the flow runs of a schedule."""


@flow(name="nightly-retrain", validate_parameters=True, on_crashed=[fail_run_with_unknown_parameters])
def deployed_retrain(
    pipeline: ConfigPath,
    reason: Annotated[str, titled_field("Reason"), Field(max_length=MAX_REASON_CHARACTERS)] = "",
    overrides: Overrides = (),
    resume: Annotated[str, titled_field("Run to resume"), Field(max_length=100)] = "",
    until: Annotated[StageName, titled_field("Last stage")] = "register",
    full_retrain: Annotated[bool, titled_field("Train from scratch")] = False,
    dry_run: Annotated[bool, titled_field("Dry run")] = False,
    promote: Annotated[Promote, titled_field("Promotion")] = "by_gate",
) -> State:
    """Retrain the retriever from the newest data and register the result.

    Args:
        pipeline: Path of the config file on the worker. The file is read when the run starts.
        reason: Why you start this run, in one line. It becomes a tag of the run in Prefect and MLflow. Required if Promotion is
            force.
        overrides: Settings that differ from the config file in this run only, as key=value, for example training.epochs=3.
        resume: Run id of an interrupted run of this pipeline, such as 20261121-070312-ab12. The run keeps its complete stages.
            Give the same settings and options as at the first start of the run. If empty, a new run starts, with
            one exception: with schedule.unfinished_run=resume, a scheduled run resumes an unfinished previous run.
        until: The run ends after this stage.
        full_retrain: Read all input files, build the vocabularies again and train without the champion's weights.
        dry_run: Run all stages and log the metrics, but register no version. To register the version later, resume the run
            without this option.
        promote: Rule that decides whether the new version becomes champion. by_gate: the comparison with the champion decides.
            never: the comparison is recorded, the alias champion is not moved. force: the new version becomes champion if it
            passes the smoke test.

    Returns:
        The end state of the flow run; docs/operations.md lists all end states.

    Raises:
        InputError: the config, a setting, an option or the input is invalid, or the run cannot be resumed; no stage has begun.
    """
    die_with_parent()  # has an effect only under `nightjar up`
    end_with_worker()
    options = RunOptions(reason=reason, full_retrain=full_retrain, dry_run=dry_run, promote=promote)
    config = load_form_config(pipeline, overrides)
    is_scheduled = SCHEDULED_TAG in runtime.flow_run.tags
    resumed_run_id = resume or (choose_run_to_resume(config) if is_scheduled else None)
    workspace = Workspace(config.workspace)
    run = StageContext(workspace.run(resumed_run_id or run_id_of_flow_run(workspace)), options=options, until=until).run
    if resumed_run_id:
        check_resume(config, run)
    check_inputs(config)
    with workspace.lock(run_id=run.run_id), explain_disk_full(run.folder):
        end_lost_runs_of_deployment()
        try:
            state: State = nightly_retrain.fn(config, run_id=run.run_id, until=until, options=options)
        except TrackingServerError as error:
            raise StageError(f"{error}; resume the run: start it from the same form with the run id {run.run_id}") from None
    return state
