"""Refit: the promoted model, trained again on all events of the run, as a separate version.

When the gate has promoted a version, its validation and test events have served their purpose. The refit trains on them too,
with the same settings, from the same initial weights, and for as many epochs as the validation has chosen. No events are left
to measure the refit. Later versions are therefore compared with the promoted version, and the refit only has to pass the smoke
test.
"""

import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from mlflow.entities.model_registry import ModelVersion

from recsys_core.disk import write_text
from recsys_core.errors import StageError, counted
from recsys_core.ingest import InputConfig
from recsys_core.ingest.log.merged_splits import merge_splits
from recsys_core.manifests import (
    EvaluationManifest,
    ExportManifest,
    IndexManifest,
    InteractionsManifest,
    PackageManifest,
    PlanManifest,
    RegistrationManifest,
    TrainManifest,
    create_own_folder,
)
from recsys_core.manifests.stage_folder import remove_own_folder
from recsys_core.models.config import PackageConfig
from recsys_core.refresh.config import RefreshConfig
from recsys_core.retrieval import index as index_core
from recsys_core.retrieval.config import IndexConfig
from recsys_core.serving import package as package_core
from recsys_core.training import train as train_core
from recsys_core.training.export import export as export_core
from recsys_core.training.job import Progress
from recsys_core.training.setup import TrainingSetup
from recsys_core.training.warm.starting_model import Champion
from tasks.delivery.publishers import publishers_of
from tasks.gate.sample import prepare_sample
from tasks.gate.smoke_test import ModelProcess
from tasks.gate.version_tester import VersionTester
from tasks.progress.reporting import StageLog, show_bar, training_note
from tasks.refresh.refreshed_version import refresh_champion
from tasks.registry.config import RegistryConfig
from tasks.registry.mlflow_client import RUN_ID_TAG
from tasks.registry.registry import Registry
from tasks.registry.releases import PARENT_TAG, REASONS_TAG, REFIT_OF_TAG, SPENT_DROP_TAG
from tasks.registry.versions import get_or_create_version
from tasks.runs.context import Results, StageContext
from tasks.runs.run import REFIT_FILE_NAME, REFIT_FOLDER_NAME, Run
from tasks.runs.workspace import Workspace


def refit(
    context: StageContext,
    setup: TrainingSetup,
    *,
    package_config: PackageConfig,
    index_config: IndexConfig,
    registry_config: RegistryConfig,
    refresh_config: RefreshConfig,
    inputs: InputConfig,
) -> str:
    """Train, package and register the refit of the run's version, and make it champion; return the result in one sentence.

    A resumed run continues its refit. If an error occurs, the run's version stays champion. If the champion is a refresh of
    this version, the refit is refreshed too before it becomes champion.

    Raises:
        StageError: the refit failed the smoke test or a check of its refresh.
        InputError: the refit cannot be refreshed.
    """
    log = StageLog("refit")
    registration = context.results[RegistrationManifest]
    run = context.run
    publishers = publishers_of(context.flow_run_id, context.pipeline, run_reason=context.options.reason, run_id=run.run_id)
    registry = Registry.connect(run.workspace, registry_config.model_name, publishers=publishers)
    champion, promoted_number = registry.champion(), registration.version
    if champion is not None and champion.tags.get(REFIT_OF_TAG) == promoted_number:
        if not (run.folder / REFIT_FILE_NAME).exists():  # the run was interrupted after the refit had become champion
            _finish_refit(run, version=champion)
        return f"version {champion.version}, its refit, is champion"
    if champion is None or not (str(champion.version) == promoted_number or _is_refresh_of_run(champion, run)):
        return f"version {promoted_number} is not champion any more, so it gets no refit"
    folder = run.folder / REFIT_FOLDER_NAME
    create_own_folder(folder)
    results = _train_on_all_events(context, setup, package_config=package_config, index_config=index_config, folder=folder)
    num_epochs = results[TrainManifest].num_epochs
    reason = f"refit of version {promoted_number} with the validation and test events, {counted(num_epochs, 'epoch')}"
    version = registry.call(
        get_or_create_version,
        replace(context, results=results),
        model_name=registry_config.model_name,
        client=registry.client,
        mlflow_run_id=registration.mlflow_run_id,
        refit_of=promoted_number,
    )
    registry.set_tag(version, REASONS_TAG, reason)
    registry.set_tag(version, SPENT_DROP_TAG, champion.tags.get(SPENT_DROP_TAG, "0"))
    _smoke_test(version, registry, context, max_users=registry_config.smoke_test_users)
    new_champion = _replace_champion(
        version, registry, context, promoted_number, refresh_config=refresh_config, inputs=inputs, reason=reason
    )
    if new_champion is None:
        return f"another version became champion before version {version.version}, the refit of version {promoted_number}"
    _finish_refit(run, version=new_champion)
    log.finish_step(f"version {new_champion.version} is champion: {reason}")
    return f"version {new_champion.version}, its refit, is champion"


def _replace_champion(
    version: ModelVersion,
    registry: Registry,
    context: StageContext,
    promoted_number: str,
    *,
    refresh_config: RefreshConfig,
    inputs: InputConfig,
    reason: str,
) -> ModelVersion | None:
    """Make the refit `version`, or its refresh, the champion. Return the new champion, or None if another version is champion.

    A refresh may have replaced the promoted version during the training. The refit does not have the items of this refresh, so
    the refit is refreshed too.
    """
    champion = registry.champion()
    if champion is not None and _is_refresh_of_run(champion, context.run):
        refreshed_version = refresh_champion(
            refresh_config,
            inputs,
            registry,
            workspace=context.run.workspace,
            pipeline=context.pipeline,
            successor=registry.version(version.version),  # with the tags that were set after the registration
        )
        if refreshed_version is not None and refreshed_version.problems:
            raise StageError(
                f"version {refreshed_version.version}, the refit of version {promoted_number} with the current items, does not "
                f"become champion: {'; '.join(refreshed_version.problems)}"
            )
        if refreshed_version is not None:
            return registry.version(refreshed_version.version)
    elif champion is None or str(champion.version) != promoted_number:
        return None
    is_champion = registry.move_champion(version, expected_champion=champion, reason=reason)
    return version if is_champion else None


def _is_refresh_of_run(champion: ModelVersion, run: Run) -> bool:
    """Return whether the champion is a refresh of the version that the run has promoted."""
    return bool(PARENT_TAG in champion.tags and champion.tags.get(RUN_ID_TAG) == run.run_id)


def _finish_refit(run: Run, *, version: ModelVersion) -> None:
    """Record the version of the refit, and remove the folder with the stages of the refit."""
    write_text(run.folder / REFIT_FILE_NAME, json.dumps({"version": str(version.version)}))
    remove_own_folder(run.folder / REFIT_FOLDER_NAME)


def _train_on_all_events(
    context: StageContext, setup: TrainingSetup, *, package_config: PackageConfig, index_config: IndexConfig, folder: Path
) -> Results:
    """Run the stages from training to package in `folder`; return the results of the run, updated with the new results.

    The training and a spectral block use the validation and test events as training events. The other stages use the splits of
    the run, so the index is tuned on the validation and test queries.
    """
    results, dataset = Results(context.results), context.dataset
    merged_interactions = merge_splits(dataset.interactions, folder / InteractionsManifest.stage)
    original_training = results[TrainManifest]
    num_epochs = original_training.best_epoch or original_training.num_epochs
    training = setup.training.model_copy(update={"epochs": num_epochs, "validation": None})
    original_export = results[ExportManifest]
    model = setup.model.with_choices(
        temperature=original_training.temperature,
        block_weight=original_export.spectral_block_weight,
        popularity_weight=original_export.popularity_weight,
    )
    refit_setup = replace(setup, training=training, model=model)
    warm_from = original_training.warm_from
    train = train_core.train(
        refit_setup,
        dataset=replace(dataset, interactions=merged_interactions),
        plan=results[PlanManifest],
        folder=folder / TrainManifest.stage,
        on_progress=_show_progress,
        champion=None if warm_from is None else _starting_model(warm_from, context),
    )
    results.add(train)
    export = export_core.export_vectors(
        refit_setup, dataset=dataset, train=train, folder=folder / ExportManifest.stage, train_log=merged_interactions
    )
    results.add(export)
    results.add(index_core.build_indexes(index_config, export=export, folder=folder / IndexManifest.stage))
    results.add(
        package_core.build_package(
            package_config,
            export=export,
            index=results[IndexManifest],
            dataset=dataset,
            evaluation=results[EvaluationManifest],
            folder=folder / PackageManifest.stage,
        )
    )
    return results


def _starting_model(run_id: str, context: StageContext) -> Champion:
    """Return the model of run `run_id`, from which the training of this run started."""
    folder = Workspace(context.run.workspace).run(run_id).folder
    champion = Champion.in_run(run_id, folder)
    if champion is None:
        raise StageError(
            f"{folder}: some stages no longer exist, but the training of run {context.run.run_id} started from their model"
        )
    return champion


def _show_progress(progress: Progress) -> None:
    note = training_note(progress, validation={})
    show_bar("refit", num_done=progress.step, num_total=progress.total_steps, note=note)


def _smoke_test(version: ModelVersion, registry: Registry, context: StageContext, *, max_users: int) -> None:
    """Raise StageError if the version gives an invalid answer for a user of the log."""
    dataset = context.dataset
    with TemporaryDirectory(prefix="nightjar-") as folder_name, ModelProcess() as process:
        sample = prepare_sample(
            dataset.interactions, max_users=max_users, folder=Path(folder_name) / "smoke_test", features=dataset.features
        )
        VersionTester(registry, sample, context.run.workspace, process).smoke_test(version)
