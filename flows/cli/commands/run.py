"""`nightjar run`: the nightly flow in a session, and its results in the terminal."""

import shlex
from collections.abc import Mapping

from rich.text import Text

from flows.cli import output
from flows.cli.arguments import ConfigOptions, command_line
from flows.cli.commands.session import FlowCommand, PrefectServerError, flow_session
from flows.runs.before_run import check_inputs, check_resume
from flows.runs.results import RunResults
from flows.servers.prefect_server import PrefectServer
from flows.settings.config_file import LoadedConfig
from flows.settings.environment import prepare_environment
from recsys_core.data_report.limits import describe_held_out_users
from recsys_core.errors import InputError, StageError, TrackingServerError
from recsys_core.evaluation.report import MetricTable, metric_table
from recsys_core.manifests import (
    STAGES,
    DataReportManifest,
    EvaluationManifest,
    ExportManifest,
    StageName,
    TrainManifest,
    require_own_folder,
)
from recsys_core.units import format_metric
from tasks.runs.context import RunOptions, StageContext
from tasks.runs.run_record import RunRecord
from tasks.runs.workspace import Workspace


def run_pipeline(
    options: ConfigOptions,
    server: PrefectServer | None,
    *,
    until: str | None,
    resume: str | None,
    run_options: RunOptions,
    as_json: bool,
) -> None:
    """Run the nightly flow to its end, or to the stage `until`, and print its results.

    Args:
        resume: id of the run to resume; None for a new run.
    """
    last_stage = next((stage for stage in STAGES if stage == until), None)
    if until is not None and last_stage is None:
        raise InputError(f"--until {until}: no such stage; the stages are {', '.join(STAGES)}")
    loaded_config = options.read()
    prepare_input(loaded_config)
    results, command_text = run_nightly(loaded_config, server, until=last_stage, resume=resume, options=run_options)
    if as_json:
        output.print_json(results.as_json())
    else:
        print_results(results, loaded_config, command_text=command_text)


def prepare_input(loaded_config: LoadedConfig) -> None:
    """Check the input files, then set the environment for Prefect and MLflow. Raises InputError before anything is created."""
    with output.printed_log():  # the check of tens of thousands of files takes minutes
        check_inputs(loaded_config.config)
    prepare_environment(loaded_config.config.workspace)


def run_nightly(
    loaded_config: LoadedConfig,
    server: PrefectServer | None,
    *,
    until: StageName | None,
    resume: str | None,
    options: RunOptions,
) -> tuple[RunResults, str]:
    """Run the nightly flow; return the results of its stages, and the command line that starts it again."""
    config, workspace = loaded_config.config, Workspace(loaded_config.config.workspace)
    run = StageContext(workspace.run(resume or workspace.new_run_id()), options=options, until=until).run
    if resume is not None:
        check_resume(config, run)
        warn_of_other_options(RunRecord.read(run), options)
    require_own_folder(run.folder)
    command_text = command_line("run", loaded_config, _option_words(options))
    command = FlowCommand(config, server, run, command_text, resume_option=f" --resume {run.run_id}")
    try:
        with flow_session(command, "flows.nightly:nightly_retrain") as nightly_retrain:
            nightly_retrain(config, run_id=run.run_id, until=until, options=options)
    except TrackingServerError as error:
        raise StageError(f"{error}; resume the run with --resume {run.run_id}") from None
    except PrefectServerError as error:
        record = RunRecord.read(run)
        if record is None or record.state in ("Failed", "Interrupted"):
            raise StageError(f"{error}; {command.how_to_resume()}") from None
        output.print_warning(f"{error}; the run ended as {record.state}, but Prefect did not receive this state")
    # An earlier start of the run may have completed later stages, which are left out.
    return RunResults.read(run, until="package" if options.dry_run and until in (None, "register") else until), command_text


def warn_of_other_options(record: RunRecord | None, options: RunOptions) -> None:
    """Print a warning if the last start of the run had other options. They are not restored: the change may be intended."""
    if record is not None and record.options != options:
        earlier_text, current_text = (
            shlex.join(_option_words(start_options)) or "no options" for start_options in (record.options, options)
        )
        output.print_warning(f"the last start of this run had {earlier_text}; this resume has {current_text}")


def _option_words(options: RunOptions) -> list[str]:
    words = ["--reason", options.reason] * bool(options.reason) + ["--full-retrain"] * options.full_retrain
    return words + ["--promote", options.promote] * (options.promote != "by_gate") + ["--dry-run"] * options.dry_run


def print_results(results: RunResults, loaded_config: LoadedConfig, *, command_text: str) -> None:
    """Print a table of metrics, and the paths and commands for the run's results.

    Args:
        command_text: command line that resumes the run, without --resume.
    """
    registration = results.registration
    evaluation = results.stages.get(EvaluationManifest)
    if evaluation is not None:
        output.stdout.print("\n[bold]Metrics over the full catalogue[/]")
        table = metric_table(results.metrics, half_widths=evaluation.half_widths)
        print_metrics(table, served_metrics=registration.metrics if registration else {})
        output.stdout.print()
    text_by_label = {"run": str(results.run.folder)}
    train_manifest = results.stages.get(TrainManifest)
    if train_manifest is not None and train_manifest.best_epoch is not None:
        metric_values = ", ".join(f"{metric_name} {value:.4f}" for metric_name, value in train_manifest.validation.items())
        text_by_label["best epoch"] = (
            f"{train_manifest.best_epoch} of {train_manifest.num_epochs}, on the validation split: {metric_values}"
        )
    text_by_label |= _chosen_settings(results)
    data_report = results.stages.get(DataReportManifest)
    if data_report is not None:
        text_by_label["data"] = describe_held_out_users(data_report.metrics)
        text_by_label["data report"] = str(data_report.path("report.html"))
    if registration is not None:
        version_name = f"{registration.model_name} version {registration.version}"
        alias = registration.alias if results.refit_version is None else "promoted"
        text_by_label["model"] = f"{version_name}, {alias}: {registration.reasons[0]}"
        if results.refit_version is not None:
            text_by_label["refit"] = f"version {results.refit_version}, trained on all events after the promotion"
        if registration.alarm is not None:
            text_by_label["alarm"] = registration.alarm
        text_by_label["decision"] = str(results.run.folder / registration.pages["decision"])
        version_uri = f"models:/{registration.model_name}/{registration.version}"
        model_options = [] if registration.alias == "champion" else ["--model", version_uri]  # the default is the champion
        text_by_label["query"] = command_line("query", loaded_config, ["--user", "ID", "-k", "10", *model_options])
        text_by_label["browse"] = command_line("ui", loaded_config)
    else:
        text_by_label["resume"] = f"{command_text} --resume {results.run.run_id}"
    output.print_labelled(text_by_label)


def _chosen_settings(results: RunResults) -> dict[str, str]:
    """Return a text for each setting that the validation has chosen, and for each weight of the config, by setting."""
    train_manifest, export_manifest = results.stages.get(TrainManifest), results.stages.get(ExportManifest)
    text_by_label = {}
    if train_manifest is not None and train_manifest.temperature_trials:
        text_by_label["temperature"] = (
            f"{train_manifest.temperature:g}, chosen after one epoch with each of "
            f"{', '.join(train_manifest.temperature_trials)}"
        )
    for name, weight in ({} if export_manifest is None else export_manifest.weight_by_term).items():
        advice = "" if weight else f", so it changes no score; remove model.{name.replace(' ', '_')}"
        text_by_label[name] = f"weight {weight:g}{advice}"
    return text_by_label


def print_metrics(table: MetricTable, *, served_metrics: Mapping[str, float]) -> None:
    """Print models and baselines by row and metrics by column. The best value of each column is bold.

    Args:
        served_metrics: metrics of the smoke test by <ranker>/<metric>. The ranker `served` is the new version. The other
            rankers are the versions and searches that it was compared with.
    """
    rows: list[list[str | Text]] = [
        [
            row_name,
            *(
                Text(format_metric(value), "bold" if value is not None and value == best_value else "")
                for value, best_value in zip(row_values, table.best_comparable(row_name), strict=True)
            ),
        ]
        for row_name, row_values in table.rows.items()
    ]
    for ranker in dict.fromkeys(row_name.partition("/")[0] for row_name in served_metrics):
        # The exact searches and the index are on the page of the decision. A refit may have been trained on the test events.
        if ranker in ("index", "refit") or ranker.startswith("exact_"):
            continue
        row_values = [served_metrics.get(f"{ranker}/{column}") for column in table.columns]
        row_name = "served" if ranker == "served" else f"{ranker.removesuffix('_champion')} served"
        rows.append([row_name, *map(format_metric, row_values)])
    output.print_table(["test", *table.columns], rows)
    for note in filter(None, (table.interval_note, table.note)):
        output.stdout.print(note, style="dim")
