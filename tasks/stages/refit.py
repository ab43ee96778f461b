"""Refit: the promoted model, trained again on all events of the run, as a version of its own.

The validation and test events have served their purpose when the gate has promoted a version. The refit uses them as training
events: with the same settings, from the same start, and for as many epochs as the validation has chosen. Nothing is left to
measure it, so later versions are compared with the promoted version, and the refit itself has to pass the smoke test.
"""

import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from mlflow.entities.model_registry import ModelVersion

from recsys_core.disk import write_text
from recsys_core.errors import StageError
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
from tasks.registry.config import RegistryConfig
from tasks.registry.registry import Registry
from tasks.registry.releases import REASONS_TAG, REFIT_OF_TAG, SPENT_DROP_TAG
from tasks.registry.versions import get_or_create_version
from tasks.runs.context import Results, StageContext
from tasks.runs.run import REFIT_FILE_NAME, REFIT_FOLDER_NAME
from tasks.runs.workspace import Workspace


def refit(
    context: StageContext, setup: TrainingSetup, *, package: PackageConfig, index: IndexConfig, registry: RegistryConfig
) -> str:
    """Train, package and register the refit of the run's version, and make it champion; return one sentence.

    A resumed run continues its refit. The run's version stays champion if an error occurs.

    Raises:
        StageError: the refit failed the smoke test, or another version has become champion in the meantime.
    """
    log = StageLog("refit")
    registration = context.results[RegistrationManifest]
    run = context.run
    publishers = publishers_of(context.flow_run_id, context.pipeline, run_reason=context.options.reason, run_id=run.run_id)
    connected = Registry.connect(run.workspace, registry.model_name, publishers=publishers)
    champion, parent = connected.champion(), registration.version
    if champion is not None and champion.tags.get(REFIT_OF_TAG) == parent:
        return f"version {champion.version}, its refit, is champion"
    if champion is None or str(champion.version) != parent:
        return f"version {parent} is not champion any more, so it gets no refit"
    folder = run.folder / REFIT_FOLDER_NAME
    create_own_folder(folder)
    results = _train_on_all_events(context, setup, package=package, index=index, folder=folder)
    num_epochs = results[TrainManifest].num_epochs
    reason = f"refit of version {parent} with the validation and test events, {num_epochs} epoch{'s' * (num_epochs != 1)}"
    version = connected.call(
        get_or_create_version,
        replace(context, results=results),
        model_name=registry.model_name,
        client=connected.client,
        mlflow_run_id=registration.mlflow_run_id,
        refit_of=parent,
    )
    connected.set_tag(version, REASONS_TAG, reason)
    connected.set_tag(version, SPENT_DROP_TAG, champion.tags.get(SPENT_DROP_TAG, "0"))
    _smoke_test(version, connected, context, max_users=registry.smoke_test_users)
    if not connected.move_champion(version, expected=champion, reason=reason):
        raise StageError(f"another version became champion before version {version.version}, the refit of version {parent}")
    write_text(run.folder / REFIT_FILE_NAME, json.dumps({"version": str(version.version)}))
    remove_own_folder(folder)
    log.finish_step(f"version {version.version} is champion: {reason}")
    return f"version {version.version}, its refit, is champion"


def _train_on_all_events(
    context: StageContext, setup: TrainingSetup, *, package: PackageConfig, index: IndexConfig, folder: Path
) -> Results:
    """Run the stages from training to package in `folder`; return the results of the run, updated with the new results.

    Only the training and a spectral block read the events as training events. The index is tuned on the queries of the run's
    own splits.
    """
    results, dataset = Results(context.results), context.dataset
    merged = merge_splits(dataset.interactions, folder / InteractionsManifest.stage)
    run_train = results[TrainManifest]
    num_epochs = run_train.best_epoch or run_train.num_epochs
    training = setup.training.model_copy(update={"epochs": num_epochs, "validation": None})
    export = results[ExportManifest]
    model = setup.model.with_choices(
        temperature=run_train.temperature,
        block_weight=export.spectral_block_weight,
        popularity_weight=export.popularity_weight,
    )
    refit_setup = replace(setup, training=training, model=model)
    warm_from = run_train.warm_from
    train = train_core.train(
        refit_setup,
        dataset=replace(dataset, interactions=merged),
        plan=results[PlanManifest],
        folder=folder / TrainManifest.stage,
        on_progress=_show_progress,
        champion=None if warm_from is None else _starting_model(warm_from, context),
    )
    results.add(train)
    export = export_core.export_vectors(
        refit_setup, dataset=dataset, train=train, folder=folder / ExportManifest.stage, train_log=merged
    )
    results.add(export)
    results.add(index_core.build_indexes(index, export=export, folder=folder / IndexManifest.stage))
    results.add(
        package_core.build_package(
            package,
            export=export,
            index=results[IndexManifest],
            dataset=dataset,
            evaluation=results[EvaluationManifest],
            folder=folder / PackageManifest.stage,
        )
    )
    return results


def _starting_model(run_id: str, context: StageContext) -> Champion:
    """Return the model from which the training of the run started."""
    folder = Workspace(context.run.workspace).run(run_id).folder
    champion = Champion.in_run(run_id, folder)
    if champion is None:
        raise StageError(
            f"{folder}: has no complete stages any more, but the training of run {context.run.run_id} started there"
        )
    return champion


def _show_progress(progress: Progress) -> None:
    note = training_note(progress, validation={})
    show_bar("refit", num_done=progress.step, num_total=progress.total_steps, note=note)


def _smoke_test(version: ModelVersion, registry: Registry, context: StageContext, *, max_users: int) -> None:
    """Raise StageError if the answers of the version for users of the log are invalid."""
    dataset = context.dataset
    with TemporaryDirectory(prefix="nightjar-") as folder, ModelProcess() as process:
        sample = prepare_sample(
            dataset.interactions, max_users=max_users, folder=Path(folder) / "smoke_test", features=dataset.features
        )
        VersionTester(registry, sample, context.run.workspace, process).smoke_test(version)
