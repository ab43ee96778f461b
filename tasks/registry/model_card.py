"""Model card of a version, in Markdown: data, metrics of the model and the baselines, slices, limits, and serving."""

from mlflow.entities import Run as MlflowRun

from recsys_core.data_report.limits import describe_held_out_users
from recsys_core.errors import counted
from recsys_core.evaluation.report import metric_table, slices_to_markdown, to_markdown
from recsys_core.manifests import (
    DataReportManifest,
    EvaluationManifest,
    IndexManifest,
    InteractionsManifest,
    PackageManifest,
    TrainManifest,
)
from recsys_core.serving.description import PackageDescription
from recsys_core.units import MIB
from tasks.runs.context import StageContext

MAX_CARD_CHARACTERS = 5_000
"""MLflow's database has room for this many characters in the description of a version."""


def model_card(
    context: StageContext, mlflow_run: MlflowRun, *, model_name: str, package: PackageDescription, refit_of: str | None = None
) -> str:
    """Return the model card. The slices are left out if the card would be longer than MAX_CARD_CHARACTERS.

    Args:
        refit_of: number of the refitted version; None if this version is no refit.
    """
    evaluation = context.results[EvaluationManifest]
    metrics_markdown = to_markdown(metric_table(evaluation.metrics, half_widths=evaluation.half_widths))
    run_info = mlflow_run.info
    metrics_intro = "On the test events" if refit_of is None else f"Metrics of version {refit_of}, on the test events"
    sections = [
        _model_section(context, package),
        _data_section(context),
        f"## Metrics\n\n{metrics_intro}, over the full catalogue, with confidence intervals over users:\n\n{metrics_markdown}",
        _limits_section(context, package, refit_of=refit_of),
        _serving_section(model_name, package),
        f"Run {context.run.run_id}: [MLflow run](#/experiments/{run_info.experiment_id}/runs/{run_info.run_id})",
    ]
    # The slices of a feature are named <feature>=<value>. There may be many, so they are left out.
    slices = [report for report in evaluation.slices if "=" not in report.name]
    if slices:
        slice_section = f"## Slices\n\n{slices_to_markdown(slices, shown=('recall@20', 'ndcg@10'))}"
        card = "\n\n".join([*sections[:3], slice_section, *sections[3:]])
        if len(card) <= MAX_CARD_CHARACTERS:
            return card
    return "\n\n".join(sections)[:MAX_CARD_CHARACTERS]


def _model_section(context: StageContext, package: PackageDescription) -> str:
    results = context.results
    train_manifest, index_manifest = results[TrainManifest], results[IndexManifest]
    training_text = f"trained for {counted(train_manifest.num_epochs, 'epoch')} on {train_manifest.num_examples:,} examples"
    if train_manifest.warm_from is not None:
        training_text += f", starting from the model of run {train_manifest.warm_from}"
    index_report = index_manifest.reports[index_manifest.served_index]
    return (
        f"Two-tower retrieval model: {package.quantization} query tower, {package.model.num_items:,} item vectors of "
        f"{package.model.config.output_dim} numbers ({package.similarity} similarity, space_id `{package.space_id}`), "
        f"{index_manifest.served_index} index with recall@{index_report.k} {index_report.recall:.4f} of exact search, "
        f"{results[PackageManifest].size_bytes / MIB:,.1f} MiB; {training_text}."
    )


def _data_section(context: StageContext) -> str:
    interactions = context.dataset.interactions
    period_text = f" from {interactions.first_time} to {interactions.last_time}" if interactions.first_time else ""
    held_out_users_text = describe_held_out_users(context.results[DataReportManifest].metrics)
    return (
        f"## Data\n\n{interactions.num_events:,} events{period_text}, {interactions.num_users:,} users, "
        f"{interactions.num_items:,} items; {interactions.num_train_events:,} training events; {held_out_users_text}."
    )


def _limits_section(context: StageContext, package: PackageDescription, *, refit_of: str | None) -> str:
    limits = [
        "An item that is not in the catalogue is never recommended. A user without a history gets the most popular items, "
        "unless the request has a history or features.",
        _training_events_limit(context.dataset.interactions, refit_of=refit_of),
    ]
    if not any(key.startswith("context.") for key in package.features):
        limits.append("The model does not read the context of a request.")
    limits.append("The metrics come from logged events, which the recommender of that time has influenced.")
    return "## Limits\n\n" + "\n".join(f"- {limit}" for limit in limits)


def _training_events_limit(interactions: InteractionsManifest, *, refit_of: str | None) -> str:
    newest_event_sentence = f" The newest event of the log is of {interactions.last_time}." if interactions.last_time else ""
    if refit_of is not None:
        return (
            f"The training used all events, including the validation and test events that measured version {refit_of}. The "
            f"metrics of this version are not known.{newest_event_sentence}"
        )
    return f"Validation and test events were not trained on.{newest_event_sentence}"


def _serving_section(model_name: str, package: PackageDescription) -> str:
    filters_sentence = (
        f" Filter columns: {', '.join(f'`{name}`' for name in package.filter_columns)}." if package.filter_columns else ""
    )
    return (
        "## Serve\n\n"
        "    nightjar serve nightly.yaml\n"
        f"    mlflow models serve -m models:/{model_name}@champion --env-manager local\n\n"
        f"A request has `user_id`, `history` or features.{filters_sentence} docs/serving.md describes requests and answers."
    )
