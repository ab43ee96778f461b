"""Stage `evaluate`."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from recsys_core.evaluation import evaluate as evaluate_core
from recsys_core.evaluation.config import EvaluationConfig
from recsys_core.evaluation.report import metric_table, to_markdown
from recsys_core.manifests import Dataset, EmbeddingsManifest, EvaluationManifest, ExportManifest, InteractionsManifest
from tasks.reporting import begin, show_bar, show_markdown
from tasks.run import Run


@task(name="evaluate", cache_policy=NO_CACHE)
def evaluate(
    config: EvaluationConfig,
    *,
    export: ExportManifest,
    interactions: InteractionsManifest,
    embeddings: EmbeddingsManifest | None,
    run: Run,
) -> EvaluationManifest:
    """Vectors -> exact metrics beside the baselines, shown as an artifact."""
    finish = begin("evaluate")
    manifest = evaluate_core.evaluate(
        config,
        export=export,
        dataset=Dataset(interactions, embeddings),
        folder=run.stage_folder("evaluate"),
        on_progress=lambda done, total: show_bar("evaluate", done=done, total=total, note=f"{done:,} of {total:,} queries"),
    )
    table = metric_table(manifest.metrics)
    show_markdown("metrics", to_markdown(table))
    facts = (f"{column} {value:.4f}" for column, value in zip(table.columns, table.rows["model"], strict=True))
    finish(manifest, ", ".join(list(facts)[:3]))
    return manifest
