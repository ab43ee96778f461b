"""The `nightjar` command. Exit codes: 0 success, 1 failure, 2 invalid config or input, 130 SIGINT, 143 SIGTERM."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from flows.cli import operations, output
from flows.cli.arguments import DEFAULT_CONFIG_PATH, AsJson, ConfigOptions, Overrides, takes_config
from flows.interruption import Interrupted, end_process
from flows.settings.environment import silence_libraries
from recsys_core.errors import NightjarError, printable

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Retrains a two-tower retrieval model every night: parquet in, a gated, registered, servable retriever out.",
)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        from importlib.metadata import version

        output.stdout.print(f"nightjar {version('nightjar')}")
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
    from flows.settings.demo import write_demo

    run(write_demo(workspace), overrides, as_json=as_json)


@app.command(epilog="Example: nightjar init --log ratings.parquet --items movies.parquet --vectors vectors.parquet")
def init(
    config_path: Annotated[Path, typer.Argument(metavar="FILE", help="file to write")] = DEFAULT_CONFIG_PATH,
    log: Annotated[str | None, typer.Option(help="parquet file, folder or glob with the interaction log")] = None,
    items: Annotated[str | None, typer.Option(help="parquet file with features of the items")] = None,
    vectors: Annotated[str | None, typer.Option(help="parquet file with pretrained vectors of the items")] = None,
    user_column: Annotated[str | None, typer.Option(help="column of the log with the users")] = None,
    item_column: Annotated[str | None, typer.Option(help="column of the log with the items")] = None,
    time_column: Annotated[str | None, typer.Option(help="column of the log with the times")] = None,
    every_setting: Annotated[bool, typer.Option("--all", help="write every setting, not only the important settings")] = False,
) -> None:
    """Write a config with the important settings and their descriptions; guess the columns of the given files."""
    from flows.settings.template import starter_config, to_commented_yaml
    from recsys_core.errors import InputError

    if config_path.exists():
        raise InputError(f"{config_path}: exists already; remove it, or name another file")
    if not config_path.parent.is_dir():
        raise InputError(f"{config_path}: the folder {config_path.parent} does not exist; create it first")
    if log is None and (user_column or item_column or time_column):
        raise InputError("--user-column, --item-column and --time-column name columns of the log; add --log")
    config, notes, next_step = starter_config(), dict[str, str](), "set your paths and columns"
    if log is not None or items is not None or vectors is not None:
        from flows.settings.column_guesses import FILL_IN, InitInputs, guess_config

        inputs = InitInputs(log, items, vectors, user_column, item_column, time_column)
        config, notes = guess_config(config, inputs, config_folder=config_path.parent)
        unknown = [setting for setting, note in notes.items() if note.startswith(FILL_IN)]
        next_step = f"fill in {' and '.join(unknown)}" if unknown else "check the guessed columns"
    config_path.write_text(to_commented_yaml(config, notes=notes, every_setting=every_setting), encoding="utf-8")
    output.stdout.print(
        f"wrote {config_path}; {next_step}, then: nightjar validate {config_path}", markup=False, soft_wrap=True
    )


@app.command(epilog="Example: nightjar validate nightly.yaml --set model.embedding_dim=128")
@takes_config
def validate(options: ConfigOptions) -> None:
    """Check the config, and the files, columns and types of the input, without a run."""
    config = options.read().config
    from flows.runs.input_checks import check_inputs

    with output.log_lines():
        facts = check_inputs(config)
    output.print_facts(facts, console=output.stdout)
    output.stdout.print(f"{options.path}: OK. Run it with: nightjar run {options.path}", markup=False, soft_wrap=True)


@app.command(epilog="Example: nightjar plan nightly.yaml --nodes 2 --gpus-per-node 8 --hbm-gb 80")
@takes_config
def plan(
    options: ConfigOptions,
    nodes: Annotated[int | None, typer.Option(min=1, help="number of hosts")] = None,
    gpus_per_node: Annotated[int | None, typer.Option(min=1, help="GPUs per host; implies device cuda")] = None,
    hbm_gb: Annotated[float | None, typer.Option(min=0.1, help="memory per GPU")] = None,
    as_json: AsJson = False,
) -> None:
    """Plan the sharding for any cluster, without training: ingest the data, write plan.json and plan.html.

    Memory and bandwidths of the hosts are settings of sharding.cluster, e.g. --set sharding.cluster.inter_host_gb_s=25.
    """
    from flows.cli.plan import plan_for, print_plan

    device = None if gpus_per_node is None else "cuda"
    cluster_options = {"num_nodes": nodes, "processes_per_node": gpus_per_node, "hbm_gb": hbm_gb, "device": device}
    cluster_settings = {setting: value for setting, value in cluster_options.items() if value is not None}
    sharding_plan, paths = plan_for(options.read().config, cluster_settings=cluster_settings)
    if as_json:
        sys.stdout.write(sharding_plan.model_dump_json() + "\n")
    else:
        print_plan(sharding_plan, paths=paths, console=output.stdout)


@app.command(epilog="Example: nightjar run nightly.yaml --set training.batch_size=8192 --resume 20261121-070312-ab12")
@takes_config
def run(
    options: ConfigOptions,
    until: Annotated[str | None, typer.Option(help="stop after this stage, e.g. evaluate")] = None,
    resume: Annotated[str | None, typer.Option(metavar="RUN_ID", help="resume this run at its first incomplete stage")] = None,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="why you start this run; a tag in Prefect and MLflow")] = "",
    full_retrain: Annotated[bool, typer.Option("--full-retrain", help="rebuild the vocabularies, train from scratch")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="run all stages, log the metrics, register no version")] = False,
    promote: Annotated[
        Literal["by_gate", "never", "force"],
        typer.Option(help="rule that decides whether the new version becomes champion; force needs --reason"),
    ] = "by_gate",
    as_json: AsJson = False,
) -> None:
    """Run the pipeline: ingest, plan, train, export, evaluate, index, package, register."""
    from flows.servers.prefect_server import embedded_server

    with embedded_server() as server:  # the server starts while the config and the input are read
        from flows.cli import runner
        from tasks.runs.context import RunOptions

        run_options = RunOptions(reason=reason, full_retrain=full_retrain, dry_run=dry_run, promote=promote)
        command, last_stage = runner.prepare_run(options, server, until=until, run_options=run_options)
        results = runner.run_nightly(command, resume=resume, until=last_stage, options=run_options)
    if as_json:
        sys.stdout.write(results.as_json() + "\n")
    else:
        runner.print_results(results, config_path=options.path, command_line=command.command_line)


@app.command(epilog="Example: nightjar tune nightly.yaml --trials 40")
@takes_config
def tune(
    options: ConfigOptions,
    trials: Annotated[int | None, typer.Option(min=1, help="number of trials, instead of tuning.trials")] = None,
    as_json: AsJson = False,
) -> None:
    """Search the ranges in `tuning` for the best validation metric. The same command resumes an interrupted search."""
    from flows.servers.prefect_server import embedded_server

    with embedded_server() as server:
        from flows.cli import tune as tuning

        study = tuning.run_study(options, server, trials=trials)
    if as_json:
        sys.stdout.write(tuning.as_json(study) + "\n")
    else:
        tuning.print_study(study, config_path=options.path)


@app.command(epilog="Example: nightjar backtest --days 7")
@takes_config
def backtest(
    options: ConfigOptions,
    days: Annotated[int, typer.Option(min=1, max=366, help="number of past days, one run for each")] = 7,
) -> None:
    """Run the pipeline as it would have run on each of the last days. The same command resumes an interrupted backtest."""
    from flows.servers.prefect_server import embedded_server

    with embedded_server() as server:
        from flows.cli import backtest as backtesting

        results = backtesting.run_backtest(options, server, num_days=days)
    backtesting.print_days(options.read().config, results)


@app.command("gate-noise", epilog="Example: nightjar gate-noise --seeds 5")
@takes_config
def gate_noise(
    options: ConfigOptions,
    seeds: Annotated[int, typer.Option(min=2, max=100, help="number of trainings, each with another seed")] = 5,
) -> None:
    """Measure how much the metric of the gate differs between seeds of the training. The same command resumes."""
    from flows.servers.prefect_server import embedded_server

    with embedded_server() as server:
        from flows.cli import backtest as backtesting

        noise = backtesting.run_gate_noise(options, server, num_seeds=seeds)
    backtesting.print_gate_noise(options.read().config, noise)


@app.command(epilog="Example: nightjar query --user 42 -k 10")
@takes_config
def query(
    options: ConfigOptions,
    user: Annotated[str, typer.Option(help="user id as in the log; unknown users get the most popular items")],
    k: Annotated[int, typer.Option("-k", min=1, help="number of items to return")] = 10,
    model: Annotated[
        str | None, typer.Option(metavar="URI", help="a version other than the champion, e.g. models:/nightjar/3")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Recommend items to a user with the champion, or with --model."""
    config = options.prepare().config
    from flows.query import recommend

    answer = recommend(config, user=user, k=k, model_uri=model)
    if not answer.known_user:
        output.stderr.print(
            f"user {printable(user)} is unknown to version {answer.version}: these are the most popular items",
            markup=False,
            soft_wrap=True,
        )
    if as_json:
        sys.stdout.write(answer.model_dump_json() + "\n")
        return
    output.stdout.print(f"{answer.model} version {answer.version}, user {printable(user)}", markup=False, soft_wrap=True)
    rows = [[str(item.item_id), f"{item.score:.4f}"] for item in answer.items]
    output.print_table(["item", "score"], rows, console=output.stdout)


app.registered_commands += operations.commands.registered_commands


def main() -> None:
    """Run the `nightjar` command; print one message and exit with a code for every expected error."""
    silence_libraries()
    try:
        app()
    except Interrupted as error:
        end_process(error)
    except NightjarError as error:
        output.stderr.print(f"error: {output.printable_lines(str(error))}", style="red", markup=False, soft_wrap=True)
        sys.exit(error.exit_code)
