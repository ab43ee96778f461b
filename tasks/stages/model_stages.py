"""Stages from the sharding plan to the package: `plan_sharding`, `train`, `export`, `evaluate`, `build_index` and `package`."""

import json

from recsys_core.disk import write_text
from recsys_core.evaluation import evaluate as evaluate_core
from recsys_core.evaluation.config import EvaluationConfig
from recsys_core.evaluation.held_out import ranking_settings
from recsys_core.evaluation.report import metric_table, plot_loss, slices_to_markdown, to_markdown
from recsys_core.manifests import (
    EvaluationManifest,
    ExportManifest,
    IndexManifest,
    PackageManifest,
    PlanManifest,
    TrainManifest,
)
from recsys_core.models.config import PackageConfig
from recsys_core.retrieval import index as index_core
from recsys_core.retrieval.config import IndexConfig
from recsys_core.retrieval.plot import index_table, plot_indexes
from recsys_core.serving import package as package_core
from recsys_core.sharding.plan_file import PlanFile
from recsys_core.training import train as train_core
from recsys_core.training.export import export as export_core
from recsys_core.training.job import Progress
from recsys_core.training.setup import TrainingSetup
from recsys_core.training.warm.starting_model import Champion
from recsys_core.units import MIB
from tasks.progress.artifacts import TrainingProgress, show_image, show_markdown
from tasks.progress.reporting import show_bar, training_summary
from tasks.registry.metric_relay import MetricRelay
from tasks.registry.mlflow_client import LOG, RUN_ID_TAG, call_or_warn
from tasks.registry.releases import champion_of
from tasks.runs.context import StageContext
from tasks.runs.run import CHAMPION_FILE_NAME, Run
from tasks.runs.workspace import Workspace
from tasks.stages.stage import stage


@stage(PlanManifest)
def plan_sharding(context: StageContext, setup: TrainingSetup) -> tuple[PlanManifest, str]:
    """Assign the shards of each table to ranks; write plan.json and plan.html."""
    manifest = setup.plan(context.dataset, folder=context.folder(PlanManifest))
    plan = PlanFile.read(manifest.path("plan.json"))
    show_markdown(context, "sharding-plan", plan.to_markdown())
    tables_text = ", ".join(f"{table_name} {table.sharding_type}" for table_name, table in plan.tables.items())
    return manifest, f"{plan.world_size} {plan.device} ranks: {tables_text}"


@stage(TrainManifest)
def train(context: StageContext, setup: TrainingSetup, *, model_name: str) -> tuple[TrainManifest, str]:
    """Train with torchrun on one or more hosts; send each line of metrics to MLflow, the terminal and a Prefect artifact."""
    progress_artifact = TrainingProgress(context)
    champion = starting_champion(model_name, run=context.run) if setup.training.warm_start is not None else None
    with MetricRelay(context) as relay:

        def on_progress(progress: Progress) -> None:
            relay.send(progress)
            progress_artifact.send(progress)

        manifest = train_core.train(
            setup,
            dataset=context.dataset,
            plan=context.results[PlanManifest],
            folder=context.folder(TrainManifest),
            on_progress=on_progress,
            champion=champion,
        )
    show_image(context, "training-loss", plot_loss(manifest, path=context.run.folder / "loss.png"))
    return manifest, progress_artifact.finish(training_summary(manifest, config=setup.training))


def starting_champion(model_name: str, *, run: Run) -> Champion | None:
    """Return the champion of `model_name` with the stages of its run; None if `run` must train from scratch.

    The id of the champion's run is saved in the folder of `run`. If `run` is resumed, its training therefore starts from the
    same model, even if another version has become champion in the meantime.
    """
    champion_file = run.folder / CHAMPION_FILE_NAME
    if champion_file.is_file():
        run_id = json.loads(champion_file.read_bytes())["run_id"]
    else:
        version = call_or_warn(
            lambda client: champion_of(client, model_name),
            workspace=run.workspace,
            warning="could not read the champion from MLflow",
        )
        run_id = None if version is None else version.tags.get(RUN_ID_TAG)
        run.folder.mkdir(parents=True, exist_ok=True)
        write_text(champion_file, json.dumps({"run_id": run_id}))
    if run_id is None:
        LOG.info("training from scratch: %s had no champion when this run began", model_name)
        return None
    champion_run = Workspace(run.workspace).run(run_id)
    champion = Champion.in_run(run_id, champion_run.folder)
    if champion is None:
        LOG.info(
            "training from scratch: stages of run %s, which trained the champion, are missing in %s",
            run_id,
            champion_run.folder.parent,
        )
    return champion


@stage(ExportManifest)
def export_vectors(context: StageContext, setup: TrainingSetup, evaluation: EvaluationConfig) -> tuple[ExportManifest, str]:
    """Compute item vectors, query vectors and tables from the checkpoint, and rank the items for the evaluation."""
    manifest = export_core.export_vectors(
        setup,
        dataset=context.dataset,
        train=context.results[TrainManifest],
        folder=context.folder(ExportManifest),
        ranking=ranking_settings(evaluation),
    )
    queries_text = ", ".join(f"{count:,} {split} queries" for split, count in manifest.num_queries.items())
    weights_text = "".join(f", {term} with weight {weight:g}" for term, weight in manifest.weight_by_term.items())
    return manifest, f"{manifest.num_items:,} x {manifest.dim} item vectors, {queries_text}{weights_text}"


@stage(EvaluationManifest)
def evaluate(context: StageContext, config: EvaluationConfig) -> tuple[EvaluationManifest, str]:
    """Measure the rankings of the model and of the baselines over the full catalogue."""
    manifest = evaluate_core.evaluate(
        config,
        export=context.results[ExportManifest],
        dataset=context.dataset,
        folder=context.folder(EvaluationManifest),
        on_progress=lambda num_done, num_queries: show_bar(
            "evaluate", num_done=num_done, num_total=num_queries, note=f"{num_done:,} of {num_queries:,} queries"
        ),
    )
    table = metric_table(manifest.metrics, half_widths=manifest.half_widths)
    show_markdown(context, "metrics", f"{to_markdown(table)}\n\n{slices_to_markdown(manifest.slices)}")
    metric_texts = [f"{metric_name} {value:.4f}" for metric_name, value in zip(table.columns, table.rows["model"], strict=True)]
    return manifest, ", ".join(metric_texts[:3])


@stage(IndexManifest)
def build_index(context: StageContext, config: IndexConfig) -> tuple[IndexManifest, str]:
    """Build the FAISS indexes of the item vectors and measure them against exact search."""
    manifest = index_core.build_indexes(config, export=context.results[ExportManifest], folder=context.folder(IndexManifest))
    served_kind = manifest.served_index
    show_markdown(context, "index", index_table(manifest.reports, served_kind=served_kind, notes=manifest.notes))
    plot_path = plot_indexes(manifest, context.run.folder / "indexes.png")
    show_image(context, "indexes", plot_path)
    if manifest.warning is not None:
        LOG.warning("index: %s", manifest.warning)
    report = manifest.reports[served_kind]
    target_text = "" if manifest.warning is None else f", below the target of {config.recall_target:g}"
    recall_text = f"recall@{report.k} {report.recall:.4f} of exact search{target_text}"
    return manifest, f"{served_kind}: {recall_text}, {report.ms_per_query:.3f} ms per query"


@stage(PackageManifest)
def build_package(context: StageContext, config: PackageConfig) -> tuple[PackageManifest, str]:
    """Write the query tower, the served index and the ids into one folder that can be served."""
    manifest = package_core.build_package(
        config,
        export=context.results[ExportManifest],
        index=context.results[IndexManifest],
        dataset=context.dataset,
        evaluation=context.results[EvaluationManifest],
        folder=context.folder(PackageManifest),
    )
    return manifest, f"{manifest.quantization} tower, {manifest.served_index} index, {manifest.size_bytes / MIB:,.1f} MiB"
