"""`nightjar suggest`, `tune`, `backtest`, `gate-noise` and `popularity-curve`: settings that fit the data, and comparisons."""

import json
import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows import runs
from flows.cli import output
from flows.cli.arguments import ConfigOptions, command_line
from flows.cli.commands.run import prepare_input
from flows.cli.commands.session import FlowCommand, flow_session
from flows.servers.prefect_server import PrefectServer
from flows.settings.config_file import LoadedConfig, setting_value, settings_as_yaml
from flows.settings.pipeline import PipelineConfig
from flows.settings.suggested import SuggestedConfig
from flows.settings.template import require_new_file, to_commented_yaml
from recsys_core.errors import InputError, StageError
from recsys_core.manifests import ExportManifest, InteractionsManifest
from recsys_core.units import format_metric
from tasks import stages
from tasks.runs.context import StageContext
from tasks.runs.run import REDUCED_FILE_NAME, Run
from tasks.tuning.config import TuningConfig, format_setting_value, label_of
from tasks.tuning.suggestions import DataFacts, Suggestion, suggestions

if TYPE_CHECKING:
    from flows.repeated_runs import Backtest, GateNoise
    from flows.tuning import StudyResult


def suggest(loaded_config: LoadedConfig, *, new_config_path: Path | None, as_json: bool) -> None:
    """Ingest the data and print the settings that fit it. The data is kept in <workspace>/tuning, for `nightjar tune`.

    Args:
        new_config_path: path of a new config file with the suggested settings; None for no file.
    """
    config = loaded_config.config
    if new_config_path is not None:
        require_new_file(new_config_path)
    run = Run("data", workspace=config.workspace.absolute(), parent_name="tuning")
    with run.lock(), output.printed_stages():
        facts = DataFacts.of(stages.data_stages.ingest(StageContext(run), config.input_config), config.interactions.split)
    suggestion_list = suggestions(facts)
    suggested_config = SuggestedConfig.of(config, suggestion_list)
    if new_config_path is not None:
        note_by_setting = {
            suggestion.setting: f"suggested: {suggestion.reason}"
            for suggestion in suggestion_list
            if suggestion.setting in suggested_config.changes
        }
        config_yaml = to_commented_yaml(suggested_config.config, note_by_setting=note_by_setting, every_setting=False)
        new_config_path.write_text(config_yaml, encoding="utf-8")
    if as_json:
        suggestion_fields = [suggestion.model_dump(exclude={"search"}) for suggestion in suggestion_list]
        summary = {"facts": facts.model_dump(), "suggestions": suggestion_fields, "changed": suggested_config.changes}
        summary["left_out"] = suggested_config.problem_by_setting
        output.print_json(json.dumps(summary))
        return
    _print_facts(facts)
    rows = [_suggestion_row(config, suggestion, suggested_config) for suggestion in suggestion_list]
    output.print_table(["setting", "now", "suggested", "why"], rows, left_columns=(0, 3))
    _print_changes(loaded_config, suggested_config, new_config_path=new_config_path)


def _print_facts(facts: DataFacts) -> None:
    output.print_labelled(
        {
            "data": f"{facts.num_train_events:,} training events, {facts.num_users:,} users, {facts.num_items:,} items",
            "density": f"{100 * facts.density:.2g} % of all pairs",
            "histories": f"median {facts.history_median:,.0f}, 95 % have at most {facts.history_p95:,.0f} events",
            "cold": f"{100 * facts.cold_share:.1f} % of the held-out events are of items without a training event",
        }
    )
    output.stdout.print()


def _print_changes(loaded_config: LoadedConfig, suggested_config: SuggestedConfig, *, new_config_path: Path | None) -> None:
    """Print the suggested settings that the file does not have, and the commands that use them."""
    if not suggested_config.changes:
        output.print_line("\nThe file has all suggested settings.")
        return
    output.stdout.print("\n[bold]The changes[/], for your file")
    output.print_line(settings_as_yaml(loaded_config.config, suggested_config.changes))
    if new_config_path is not None:
        output.print_line(f"wrote {new_config_path}")
        loaded_config, overrides_text = LoadedConfig(suggested_config.config, new_config_path), ""
    else:
        overrides_text = f" {as_overrides(suggested_config.changes)}"
    output.print_labelled(
        {
            "run": command_line("run", loaded_config) + overrides_text,
            "tune": command_line("tune", loaded_config, ["--minutes", "60"]) + overrides_text,
        }
    )


def _suggestion_row(config: PipelineConfig, suggestion: Suggestion, suggested_config: SuggestedConfig) -> list[str]:
    """Return the cells of a suggestion. A star marks a suggestion that changes the config."""
    problem = suggested_config.problem_by_setting.get(suggestion.setting)
    reason = (
        suggestion.reason if problem is None else f"{suggestion.reason}; left out, because it contradicts the file: {problem}"
    )
    change_mark = " *" if suggestion.setting in suggested_config.changes else ""
    current_value = format_setting_value(setting_value(config, suggestion.setting))
    return [suggestion.setting, current_value, f"{format_setting_value(suggestion.value)}{change_mark}", reason]


def tune(
    options: ConfigOptions,
    server: PrefectServer | None,
    *,
    num_trials: int | None,
    minutes: float | None,
    as_json: bool,
) -> None:
    """Search the best settings and print the trials; raise StageError if no trial is complete.

    Args:
        num_trials: replaces tuning.trials.
        minutes: replaces tuning.timeout_s.
    """
    loaded_config = options.read()
    config = tunable_config(loaded_config, num_trials=num_trials, minutes=minutes)
    option_words = [] if num_trials is None else ["--trials", str(num_trials)]
    option_words += [] if minutes is None else ["--minutes", f"{minutes:g}"]
    study: StudyResult = _run_flow(
        "flows.tuning:tune_settings",
        loaded_config,
        server,
        [config],
        folder_name="tuning",
        command_words=["tune", *option_words],
    )
    if not study.trials:
        raise StageError(
            "the time of the search, --minutes or tuning.timeout_s, was over before the first trial started; run the command "
            "again, which does not repeat the ingest, or give it more time"
        )
    if study.best_trial is None:
        last_trial = study.trials[-1]
        raise StageError(
            f"none of {len(study.trials)} trials is complete; trial {last_trial.number} failed: {last_trial.reason}\n"
            f"the trials are in {study.folder}"
        )
    if as_json:
        trials = [trial.model_dump(mode="json") for trial in study.trials]
        summary = {"study": study.folder.name, "folder": str(study.folder), "metric": study.metric, "trials": trials}
        output.print_json(json.dumps(summary))
    else:
        print_study(study, loaded_config)


def backtest(options: ConfigOptions, server: PrefectServer | None, *, num_days: int) -> None:
    """Run the pipeline for each of the last days and print the metrics of each day."""
    loaded_config = options.read()
    command_words = ["backtest", "--days", str(num_days)]
    backtest_result = _run_flow(
        "flows.repeated_runs:backtest",
        loaded_config,
        server,
        [loaded_config.config, num_days],
        folder_name="backtest",
        command_words=command_words,
    )
    print_backtest(loaded_config.config, backtest_result)


def gate_noise(options: ConfigOptions, server: PrefectServer | None, *, num_seeds: int) -> None:
    """Train with several seeds and print the spread of the metric."""
    loaded_config = options.read()
    flow_path, command_words = "flows.repeated_runs:measure_gate_noise", ["gate-noise", "--seeds", str(num_seeds)]
    noise = _run_flow(
        flow_path,
        loaded_config,
        server,
        [loaded_config.config, num_seeds],
        folder_name="gate-noise",
        command_words=command_words,
    )
    print_gate_noise(loaded_config.config, noise)


def popularity_curve(loaded_config: LoadedConfig, *, run_id: str | None, weights: str | None, as_json: bool) -> None:
    """Print the metrics of the validation users with several weights of item popularity, and plot them.

    Args:
        run_id: run whose vectors are ranked; None for the newest run.
        weights: numbers, separated by commas; None for weights that fit the scores.
    """
    from recsys_core.evaluation.popularity_curve import plot_curve, popularity_curve

    config, results = loaded_config.config, runs.results.open_run(loaded_config.config.workspace, run_id)
    if (results.run.folder / REDUCED_FILE_NAME).exists():
        raise InputError(
            f"{results.run.folder}: the vectors of run {results.run.run_id} are removed, because the run is older than the "
            "runs that retention.keep_full_runs keeps; choose a newer run with --run"
        )
    export = results.stages.get(ExportManifest)
    if export is None:
        raise InputError(
            f"{results.run.folder}: run {results.run.run_id} has no vectors, because its stage export is not complete; resume "
            "the run, or choose another run with --run"
        )
    points = popularity_curve(
        config.evaluation,
        export=export,
        interactions=results.stages[InteractionsManifest],
        weights=_parse_weights(weights),
    )
    folder = config.workspace.absolute() / "popularity-curve"
    folder.mkdir(parents=True, exist_ok=True)
    plot_path = plot_curve(points, path=folder / f"{results.run.run_id}.png")
    points_json = json.dumps([point.model_dump() for point in points], indent=None if as_json else 2)
    (json_path := plot_path.with_suffix(".json")).write_text(points_json + "\n", encoding="utf-8")
    if as_json:
        output.print_json(points_json)
        return
    metric_names = list(points[0].metrics)
    rows = [
        [
            f"{point.weight:.4g}{' (this run)' if point.is_served else ''}",
            *(format_metric(point.metrics.get(name)) for name in metric_names),
        ]
        for point in points
    ]
    output.stdout.print(f"\n[bold]Weights of item popularity[/], validation users of run {results.run.run_id}")
    output.print_table(["weight", *metric_names], rows)
    output.print_labelled({"plot": str(plot_path), "metrics": str(json_path)})


def _parse_weights(weights_text: str | None) -> list[float]:
    """Return the numbers of a comma-separated list.

    >>> _parse_weights("-0.1, 0,0.25")
    [-0.1, 0.0, 0.25]
    """
    try:
        weights = [float(weight) for weight in (weights_text or "").split(",") if weight.strip()]
    except ValueError:
        raise InputError(
            f"--weights {weights_text} is not a list of numbers; write, for example, --weights=-0.1,0,0.1"
        ) from None
    if not all(math.isfinite(weight) for weight in weights):
        raise InputError(f"--weights {weights_text} has a number that is not finite; write, for example, --weights=-0.1,0,0.1")
    return weights


def _run_flow(
    flow_path: str,
    loaded_config: LoadedConfig,
    server: PrefectServer | None,
    arguments: list[Any],
    *,
    folder_name: str,
    command_words: list[str],
) -> Any:
    """Run a flow and return its result. The same command continues an interrupted flow.

    Args:
        folder_name: folder of the flow in the workspace.
        command_words: name and options of the command.
    """
    prepare_input(loaded_config)
    run = Run(folder_name, workspace=loaded_config.config.workspace, parent_name="")
    command = FlowCommand(loaded_config.config, server, run, command_line(command_words[0], loaded_config, command_words[1:]))
    with flow_session(command, flow_path) as flow:
        return flow(*arguments)


def tunable_config(loaded_config: LoadedConfig, *, num_trials: int | None, minutes: float | None = None) -> PipelineConfig:
    """Return the config with the size of the search; raise InputError if there is no metric by which trials are compared."""
    tuning = loaded_config.config.tuning or TuningConfig()
    if loaded_config.config.training.validation is None:
        raise InputError(
            f"{loaded_config.path}: training.validation is null, so trials have no metric to be compared by; remove "
            "this setting to use the default ndcg@10"
        )
    changes: dict[str, object] = {} if num_trials is None else {"trials": num_trials}
    changes |= {} if minutes is None else {"timeout_s": 60 * minutes}
    return loaded_config.config.model_copy(update={"tuning": tuning.model_copy(update=changes)})


def print_study(study: "StudyResult", loaded_config: LoadedConfig) -> None:
    """Print the trials, the best first, and the best settings as YAML and as a command."""
    best_trial = study.best_trial
    assert best_trial is not None
    rows = [
        [
            str(trial.number),
            format_metric(trial.value),
            str(max(trial.epochs, default=0)),
            f"{trial.seconds:,.0f}",
            *(
                format_setting_value(trial.settings[setting]) if setting in trial.settings else "-"
                for setting in best_trial.settings
            ),
            trial.ending,
        ]
        for trial in study.trials
    ]
    output.stdout.print(f"\n[bold]Trials[/], the best first: {study.metric} on the validation split")
    output.print_table(["trial", study.metric, "epochs", "seconds", *best_trial.settings, "ended"], rows)
    output.stdout.print("\n[bold]The best settings[/], for your file")
    output.print_line(study.best_file.read_text(encoding="utf-8"))
    output.print_labelled(
        {
            "saved": str(study.best_file),
            "plot": str(study.history_file),
            "run": f"{command_line('run', loaded_config)} {as_overrides(best_trial.settings)}",
            "continue": command_line("tune", loaded_config, ["--trials", str(2 * len(study.trials))]),
        }
    )


def as_overrides(settings: Mapping[str, Any]) -> str:
    """Format settings as --set options, quoted for a shell.

    >>> as_overrides({"loss.kind": "bce", "model.query.layers": [64, 32]})
    "--set loss.kind=bce --set 'model.query.layers=[64, 32]'"
    """
    return " ".join(f"--set {shlex.quote(f'{setting}={label_of(value)}')}" for setting, value in settings.items())


def print_backtest(config: PipelineConfig, backtest: "Backtest") -> None:
    """Print a row per run, and the paths of the results."""
    metric_name, folder = config.registry.metric, backtest.folder
    metric_prefixes = ("test", "baseline/popularity", "baseline/zero_shot", "baseline/closed_form", "served", "champion")
    rows = [
        [
            f"{run.until:%Y-%m-%d %H:%M}",
            run.state,
            run.version or "-",
            *(format_metric(run.metrics.get(f"{prefix}/{metric_name}")) for prefix in metric_prefixes),
        ]
        for run in backtest.runs
    ]
    column_titles = [
        "log until",
        "ended as",
        "version",
        "model",
        "popularity",
        "zero-shot",
        "closed form",
        "served",
        "champion before",
    ]
    output.stdout.print(f"\n[bold]{metric_name}[/] of each day's run")
    output.print_table(column_titles, rows)
    output.print_labelled(
        {"plot": str(folder / "backtest.png"), "metrics": str(folder / "backtest.json"), "page": str(folder / "index.html")}
    )


def print_gate_noise(config: PipelineConfig, noise: "GateNoise") -> None:
    """Print a row per seed, and the probability that the margin of the gate is exceeded by chance."""
    margin = config.registry.gate.max_relative_drop
    chance_text = f"{100 * noise.chance_of_drop(margin):.1f} %"
    rows = [[str(seed), format_metric(value)] for seed, value in noise.value_by_seed.items()]
    output.print_table(["training.seed", noise.metric], rows)
    output.print_labelled(
        {
            "mean": format_metric(noise.mean),
            "spread": f"{100 * noise.relative_sd:.1f} % of the mean (standard deviation between seeds)",
            "margin": f"{100 * margin:g} %; a training that differs only in its seed is worse by more than this margin in "
            f"{chance_text} of the runs",
        }
    )
