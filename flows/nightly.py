"""The nightly run: all stages from the parquet files to a registered retriever."""

from collections.abc import Sequence
from typing import cast

from prefect import flow, runtime
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed
from pydantic.json_schema import SkipJsonSchema

from flows.delivery import deliver
from flows.prefect_runs import flow_run_url, name_flow_run, run_id_of_flow_run
from flows.runs.after_run import after_run
from flows.runs.before_run import check_resume
from flows.settings.config_file import dump_config
from flows.settings.pipeline import PipelineConfig
from recsys_core.errors import DataRejectedError, NightjarError, first_line
from recsys_core.manifests import RegistrationManifest, StageName
from tasks import stages
from tasks.progress.reporting import LOG
from tasks.registry.tracking import require_own_experiment
from tasks.retention.budget import ensure_disk_space
from tasks.runs.context import RunOptions, StageContext
from tasks.runs.run import Run
from tasks.runs.run_record import RunState, record_run
from tasks.runs.workspace import Workspace
from tasks.stages.stage import StoppedEarly


@flow(name="nightly-retrain", validate_parameters=True)
def nightly_retrain(
    config: SkipJsonSchema[PipelineConfig],  # no deployment needs the schema of the config, which takes 0.15 s to build
    run_id: str | None = None,
    until: StageName | None = None,
    options: RunOptions = RunOptions(),  # noqa: B008  the default is frozen
) -> State:
    """Retrain the retriever from the newest data and register the result.

    Args:
        config: config of the pipeline.
        run_id: id of the run to resume. The run keeps its complete stages. None: a new run.
        until: the last stage to run. None: all stages.
        options: options of this run, which are not part of the config.

    Returns:
        The end state of the flow run, named as in `tasks.runs.run_record.RunState`. The result of a completed state is the
        manifest of the registered version; None if the run registers no version.
    """
    if options.full_retrain:
        config = config.for_full_retrain()
    context = context_of_flow_run(config, run_id=run_id, until=until, options=options)
    run = context.run
    name_flow_run(config.name, run.run_id, reason=options.reason)
    with run.lock():
        if run.config_file.is_file():
            check_resume(config, run)
        try:
            with record_run(context) as ending:
                dump_config(config, run.config_file)
                if context.until is None:
                    require_own_experiment(context)
                    ensure_disk_space(config.retention, run, model_name=config.registry.model_name)
                state = run_stages(config, context)
                ending.set(cast(RunState, state.name), state.message or "")
                return state
        finally:
            after_run(config, context)


def context_of_flow_run(
    config: PipelineConfig, *, run_id: str | None, until: StageName | None, options: RunOptions
) -> StageContext:
    """Return the context of the run that the current flow run starts or resumes. See `nightly_retrain` for the arguments."""
    workspace = Workspace(config.workspace.absolute())
    return StageContext(
        workspace.run(run_id or run_id_of_flow_run(workspace)),
        experiment=config.registry.experiment,
        options=options,
        until=None if until == "register" else until,
        pipeline=config.name,
        flow_run_id=runtime.flow_run.id,
        flow_run_url=flow_run_url(),
    )


def run_stages(config: PipelineConfig, context: StageContext) -> State:
    """Run the stages, the refit and the delivery; return the end state of the flow run."""
    try:
        registration = retrain(config, context)
    except StoppedEarly as early_stop:
        return Completed(name="StoppedEarly", message=f"stopped after {early_stop.stage}, as requested")
    except DataRejectedError as error:
        return Failed(name="DataRejected", message=str(error), data=error)
    notes = [] if registration is None else [*refit(config, context), *deliver(config)]
    return end_state(registration, run=context.run, notes=notes)


def retrain(config: PipelineConfig, context: StageContext) -> RegistrationManifest | None:
    """Run the stages in order, except stages that are already complete. Return the registration, or None for a dry run."""
    dataset = stages.data_stages.ingest(context, config.input_config)
    stages.data_report.check_data(context, config.data_report, split=config.interactions.split)
    setup = config.training_setup(dataset)
    stages.model_stages.plan_sharding(context, setup)
    stages.model_stages.train(context, setup, model_name=config.registry.model_name)
    stages.model_stages.export_vectors(context, setup, config.evaluation)
    stages.model_stages.evaluate(context, config.evaluation)
    stages.model_stages.build_index(context, config.index)
    stages.model_stages.build_package(context, config.package)
    return stages.registration.register(context, config.registry, config.guarded_slices)


def refit(config: PipelineConfig, context: StageContext) -> list[str]:
    """Refit the run's version if it was promoted and `training.refit` is set.

    Return one sentence with the result or the error; return an empty list if there is nothing to refit.
    """
    if not config.training.refit or not context.results[RegistrationManifest].promoted:
        return []
    setup = config.training_setup(context.dataset)
    try:
        return [
            stages.refit.refit(
                context,
                setup,
                package_config=config.package,
                index_config=config.index,
                registry_config=config.registry,
                refresh_config=config.refresh,
                inputs=config.input_config,
            )
        ]
    except Exception as error:  # any error of a library; the promoted version stays champion
        reason = str(error) if isinstance(error, NightjarError) else f"{type(error).__name__}: {first_line(error)}"
        problem = f"the refit failed: {reason}; resume the run to try the refit again"
        LOG.error(problem)
        return [problem]


def end_state(registration: RegistrationManifest | None, *, run: Run, notes: Sequence[str]) -> State:
    """Return the end state of a flow run that ran all stages.

    Args:
        registration: the registered version; None after a dry run.
        notes: results and errors of the refit and of the delivery.
    """
    if registration is None:
        return Completed(name="DryRun", message=f"dry run: no version is registered; resume run {run.run_id} to register one")
    reasons = "; ".join((*registration.reasons, *notes))
    message = f"{registration.model_name} version {registration.version} is {registration.alias}: {reasons}"
    if registration.alarm is not None:
        return Completed(name="BrokenChampion", message=f"{registration.alarm}; {message}", data=registration)
    return Completed(name=registration.state_name, message=message, data=registration)
