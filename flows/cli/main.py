"""The `nightjar` command. Exit codes: 0 success, 1 failure, 2 invalid config or input, 130 SIGINT, 143 SIGTERM."""

import atexit
import os
import sys
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Annotated

import typer

from flows.cli import commands, operations, output
from flows.cli.arguments import (
    DEFAULT_CONFIG_PATH,
    AsJson,
    ConfigOptions,
    InputOptions,
    Overrides,
    takes_config,
    takes_config_and_json,
    takes_inputs,
)
from flows.interruption import Interrupted, end_process
from flows.settings.environment import silence_libraries
from recsys_core.config import is_uri
from recsys_core.errors import NightjarError
from tasks.runs.context import Promote, RunOptions

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Retrains a two-tower retrieval model every night: parquet in, a gated, registered, servable retriever out.",
)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        output.print_line(f"nightjar {version_of('nightjar')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version and exit")
    ] = False,
) -> None:
    """Options of every command."""


@app.command(epilog="Example: nightjar demo --workspace demo")
def demo(
    workspace: Annotated[Path, typer.Option(help="folder for data, config, runs and models")] = Path("demo"),
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Run the whole pipeline on a generated dataset with topics, skewed popularity, drift and new items."""
    run(commands.workspace.demo(workspace), overrides, as_json=as_json)


@app.command(epilog="Example: nightjar init --log ratings.parquet --items movies.parquet --vectors vectors.parquet")
@takes_inputs
def init(
    inputs: InputOptions,
    config_path: Annotated[Path, typer.Argument(metavar="FILE", help="file to write")] = DEFAULT_CONFIG_PATH,
    every_setting: Annotated[bool, typer.Option("--all", help="write every setting, not only the important settings")] = False,
) -> None:
    """Write a config with the important settings and their descriptions; guess the columns of the given files."""
    commands.workspace.init(config_path, inputs=inputs, every_setting=every_setting)


@app.command(epilog="Example: nightjar validate nightly.yaml --set model.embedding_dim=128")
@takes_config
def validate(options: ConfigOptions) -> None:
    """Check the config, and the files, columns and types of the input, without a run."""
    commands.workspace.validate(options.read())


@app.command(epilog="Example: nightjar plan nightly.yaml --nodes 2 --gpus-per-node 8 --hbm-gb 80")
@takes_config_and_json
def plan(
    options: ConfigOptions,
    nodes: Annotated[int | None, typer.Option(min=1, help="number of hosts")] = None,
    gpus_per_node: Annotated[int | None, typer.Option(min=1, help="GPUs per host; implies device cuda")] = None,
    hbm_gb: Annotated[float | None, typer.Option(min=0.1, help="memory per GPU")] = None,
    cores: Annotated[int | None, typer.Option(min=1, help="cores per host. Default: the cores of this machine")] = None,
    users: Annotated[int | None, typer.Option(min=1, help="number of users, instead of reading the data")] = None,
    items: Annotated[int | None, typer.Option(min=1, help="number of items, instead of reading the data")] = None,
    events: Annotated[int | None, typer.Option(min=1, help="number of events, instead of reading the data")] = None,
) -> None:
    """Plan the sharding for any cluster, and estimate the hours, memory and disk of each stage, without training.

    The data are ingested first. With --users, --items and --events, no data are read. The files plan.json, plan.html and
    estimate.json are written to the folder plan of the workspace. Memory and bandwidths of the hosts are settings of
    sharding.cluster, e.g. --set sharding.cluster.inter_host_gb_s=25.
    """
    device = None if gpus_per_node is None else "cuda"
    cluster = {"num_nodes": nodes, "processes_per_node": gpus_per_node, "hbm_gb": hbm_gb, "device": device}
    config = options.with_settings({f"sharding.cluster.{name}": value for name, value in cluster.items()}).prepare().config
    sizes = commands.plan.PlannedSizes(users, items, events, cores)
    commands.plan.plan_sharding(config, sizes=sizes, as_json=options.as_json)


@app.command(epilog="Example: nightjar run nightly.yaml --set training.batch_size=8192 --resume 20261121-070312-ab12")
@takes_config_and_json
def run(
    options: ConfigOptions,
    until: Annotated[str | None, typer.Option(help="stop after this stage, e.g. evaluate")] = None,
    resume: Annotated[str | None, typer.Option(metavar="RUN_ID", help="resume this run at its first incomplete stage")] = None,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="why you start this run; a tag in Prefect and MLflow")] = "",
    full_retrain: Annotated[bool, typer.Option("--full-retrain", help="rebuild the vocabularies, train from scratch")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="run all stages, log the metrics, register no version")] = False,
    promote: Annotated[
        Promote, typer.Option(help="rule that decides whether the new version becomes champion; force needs --reason")
    ] = "by_gate",
) -> None:
    """Run the pipeline: ingest, plan, train, export, evaluate, index, package, register."""
    run_options = RunOptions(reason=reason, full_retrain=full_retrain, dry_run=dry_run, promote=promote)
    with commands.session.embedded_server() as server:  # the server starts while the config and the input are read
        commands.run.run_pipeline(options, server, until=until, resume=resume, run_options=run_options, as_json=options.as_json)


@app.command(epilog="Example: nightjar suggest nightly.yaml --write suggested.yaml")
@takes_config_and_json
def suggest(
    options: ConfigOptions,
    write: Annotated[Path | None, typer.Option(metavar="FILE", help="write a config with the suggested settings")] = None,
) -> None:
    """Print the settings that fit the data, each with its reason: model, loss, negatives, popularity, training."""
    loaded_config = options.prepare()  # sets environment variables that Prefect reads when it is imported
    commands.experiments.suggest(loaded_config, new_config_path=write, as_json=options.as_json)


@app.command(epilog="Example: nightjar tune nightly.yaml --trials 40 --minutes 60")
@takes_config_and_json
def tune(
    options: ConfigOptions,
    trials: Annotated[int | None, typer.Option(min=1, help="number of trials, instead of tuning.trials")] = None,
    minutes: Annotated[
        float | None,
        typer.Option(min=0.1, max=500_000, help="minutes after which no trial starts, instead of tuning.timeout_s"),
    ] = None,
) -> None:
    """Search the settings with the best validation metric. The same command resumes an interrupted search.

    Without `tuning.ranges`, the settings that usually matter most are varied, such as model.temperature.
    """
    with commands.session.embedded_server() as server:
        commands.experiments.tune(options, server, num_trials=trials, minutes=minutes, as_json=options.as_json)


@app.command(epilog="Example: nightjar backtest --days 7")
@takes_config
def backtest(
    options: ConfigOptions,
    days: Annotated[int, typer.Option(min=1, max=366, help="number of past days, one run for each")] = 7,
) -> None:
    """Run the pipeline as it would have run on each of the last days. The same command resumes an interrupted backtest."""
    with commands.session.embedded_server() as server:
        commands.experiments.backtest(options, server, num_days=days)


@app.command("gate-noise", epilog="Example: nightjar gate-noise --seeds 5")
@takes_config
def gate_noise(
    options: ConfigOptions,
    seeds: Annotated[int, typer.Option(min=2, max=100, help="number of trainings, each with another seed")] = 5,
) -> None:
    """Measure how much `registry.metric` depends on the training seed. The same command resumes an interrupted measurement."""
    with commands.session.embedded_server() as server:
        commands.experiments.gate_noise(options, server, num_seeds=seeds)


@app.command("popularity-curve", epilog="Example: nightjar popularity-curve --weights=-0.2,-0.1,0,0.1")
@takes_config_and_json
def popularity_curve(
    options: ConfigOptions,
    run_id: Annotated[
        str | None, typer.Option("--run", metavar="RUN_ID", help="run whose vectors are ranked; by default the newest one")
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="weights, separated by commas; by default weights that fit the scores")
    ] = None,
) -> None:
    """Compare weights of item popularity: accuracy, coverage and novelty for the validation users of a run.

    Serve a weight with `model.popularity`.
    """
    commands.experiments.popularity_curve(options.prepare(), run_id=run_id, weights=weights, as_json=options.as_json)


@app.command(epilog="Example: nightjar query --user 42 -k 10")
@takes_config_and_json
def query(
    options: ConfigOptions,
    user: Annotated[str | None, typer.Option(help="user id as in the log; unknown users get the most popular items")] = None,
    history: Annotated[
        str | None, typer.Option(metavar="IDS", help="item ids, oldest first and separated by commas, instead of the log")
    ] = None,
    item: Annotated[str | None, typer.Option(help="item id, for similar items")] = None,
    k: Annotated[int, typer.Option("-k", min=1, help="number of items to return")] = 10,
    model: Annotated[
        str | None, typer.Option(metavar="URI", help="a version other than the champion, e.g. models:/nightjar/3")
    ] = None,
) -> None:
    """Recommend items to a user or for a history, or show similar items, with the champion or with --model."""
    config = options.prepare().config
    commands.registry.query(config, user=user, history=history, item=item, k=k, model_uri=model, as_json=options.as_json)


@app.command(epilog="Example: nightjar recommend --users users.parquet -k 100 --out recommendations")
@takes_config_and_json
def recommend(
    options: ConfigOptions,
    users: Annotated[
        str | None, typer.Option(help="parquet files with user_id, history or features; by default as in the config")
    ] = None,
    k: Annotated[int | None, typer.Option("-k", min=1, help="items per user; by default as in the config")] = None,
    out: Annotated[Path | None, typer.Option(help="folder for the files; by default as in the config")] = None,
    model: Annotated[
        str | None, typer.Option(metavar="URI", help="a version other than the champion, e.g. models:/nightjar/3")
    ] = None,
) -> None:
    """Write the champion's recommendations for many users to parquet files. The defaults are in delivery.recommendations."""
    user_paths = users if users is None or is_uri(users) else str(Path(users).absolute())
    settings = {"user_paths": user_paths, "k": k, "folder": out and str(out.absolute())}
    options = options.with_settings({f"delivery.recommendations.{name}": value for name, value in settings.items()})
    config = options.prepare().config
    commands.registry.recommend(config, model_uri=model, as_json=options.as_json)


@app.command(epilog="Example: nightjar serve nightly.yaml --port 8080 --workers 4")
@takes_config
def serve(
    options: ConfigOptions,
    host: Annotated[str | None, typer.Option(help="address to listen on, instead of serve.host")] = None,
    port: Annotated[int | None, typer.Option(help="port to listen on, instead of serve.port; 0: a free port")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="number of processes, instead of serve.workers")] = None,
    alias: Annotated[str, typer.Option(help="alias of the version to serve; the server follows it")] = "champion",
) -> None:
    """Serve the champion over HTTP, and follow the registry, until Ctrl-C or SIGTERM."""
    config = options.with_settings({"serve.host": host, "serve.port": port, "serve.workers": workers}).prepare().config
    commands.registry.serve(config, alias=alias)


app.registered_commands += operations.app.registered_commands


def main() -> None:
    """Run the `nightjar` command; print one message and exit with a code for every expected error."""
    silence_libraries()
    try:
        app()
    except Interrupted as error:
        end_process(error)
    except NightjarError as error:
        output.print_line(f"error: {error}", style="red", console=output.stderr)
        sys.exit(error.exit_code)


def run_command() -> None:
    """Run the `nightjar` command, and end the process without freeing the objects of its modules.

    Freeing a million objects would take half a second. In addition, DuckDB's binding library nanobind would print forty lines
    about objects that Prefect still refers to. If the output cannot be written or an exception is not handled, Python ends the
    process as usual and reports the error.
    """
    exit_code: int | None = None

    def end_without_cleanup() -> None:
        if exit_code is not None:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(exit_code)

    atexit.register(end_without_cleanup)  # registered before heavy libraries are imported, so it runs after their exit handlers
    for stream in (sys.stdout, sys.stderr):  # in an ASCII locale, other characters are escaped
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        main()
    except SystemExit as system_exit:
        if isinstance(system_exit.code, int):
            exit_code = system_exit.code
        raise
