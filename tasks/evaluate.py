"""Stage `evaluate`."""

from recsys_core.evaluation.config import EvaluationConfig
from recsys_core.evaluation.report import metric_table, to_markdown
from recsys_core.manifests import Dataset, EvaluationManifest, ExportManifest
from tasks.artifacts import show_markdown
from tasks.reporting import StageLog, show_bar
from tasks.run import Run
from tasks.stage import stage


@stage("evaluate")
def evaluate(config: EvaluationConfig, *, export: ExportManifest, dataset: Dataset, run: Run) -> EvaluationManifest:
    """Measure the exported vectors and the baselines over the full catalogue."""
    stage_log = StageLog("evaluate")
    from recsys_core.evaluation import evaluate as evaluate_core

    manifest = evaluate_core.evaluate(
        config,
        export=export,
        dataset=dataset,
        folder=run.stage_folder("evaluate"),
        on_progress=lambda done, total: show_bar("evaluate", done=done, total=total, note=f"{done:,} of {total:,} queries"),
    )
    table = metric_table(manifest.metrics)
    show_markdown(run, "metrics", to_markdown(table))
    metrics = [f"{column} {value:.4f}" for column, value in zip(table.columns, table.rows["model"], strict=True)]
    return stage_log.finish(manifest, ", ".join(metrics[:3]))
