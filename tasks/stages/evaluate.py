"""Stage `evaluate`."""

from recsys_core.evaluation.config import EvaluationConfig
from recsys_core.evaluation.report import metric_table, to_markdown
from recsys_core.manifests import EvaluationManifest, ExportManifest
from tasks.progress.artifacts import show_markdown
from tasks.progress.reporting import show_bar
from tasks.runs.context import StageContext
from tasks.stages.stage import stage


@stage(EvaluationManifest)
def evaluate(context: StageContext, config: EvaluationConfig) -> tuple[EvaluationManifest, str]:
    """Measure the exported vectors and the baselines over the full catalogue."""
    from recsys_core.evaluation import evaluate as evaluate_core

    manifest = evaluate_core.evaluate(
        config,
        export=context.results[ExportManifest],
        dataset=context.dataset,
        folder=context.folder(EvaluationManifest),
        on_progress=lambda num_done, num_queries: show_bar(
            "evaluate", num_done=num_done, num_total=num_queries, note=f"{num_done:,} of {num_queries:,} queries"
        ),
    )
    table = metric_table(manifest.metrics)
    show_markdown(context, "metrics", to_markdown(table))
    metric_texts = [f"{metric_name} {value:.4f}" for metric_name, value in zip(table.columns, table.rows["model"], strict=True)]
    return manifest, ", ".join(metric_texts[:3])
