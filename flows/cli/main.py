"""The `nightjar` command. Exit codes: 0 done, 2 the config or the input is wrong, 130 SIGINT, 143 SIGTERM, 1 anything else."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from flows.cli import output
from flows.cli.interruption import Interrupted, end_process
from flows.environment import prepare, quieten
from recsys_core.errors import NightjarError, forget_frames

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Retrains a two-tower retrieval model every night: parquet in, a gated, registered, servable retriever out.",
)
File = Annotated[Path, typer.Argument(help="the config, see `nightjar init`")]
Sets = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="override a setting, e.g. training.epochs=3")
]
AsJson = Annotated[bool, typer.Option("--json", help="one JSON object as the last line on stdout")]
Until = Annotated[str | None, typer.Option(help="stop after this stage, e.g. evaluate")]
Verbose = Annotated[bool, typer.Option(help="show Prefect's own log too")]


@app.command(epilog="Example: nightjar demo --workspace demo")
def demo(
    workspace: Annotated[Path, typer.Option(help="folder for data, config, runs and models")] = Path("demo"),
    overrides: Sets = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """A whole night on a generated catalogue: topics, skewed popularity, drift, items that arrive on the last days."""
    from flows.cli.demo import write_demo

    run(write_demo(workspace), overrides=overrides, as_json=as_json, verbose=verbose)


@app.command(epilog="Example: nightjar init nightly.yaml")
def init(file: Annotated[Path, typer.Argument(help="file to write")] = Path("nightly.yaml")) -> None:
    """Writes a config with every setting and what it means."""
    from flows.cli.config_template import starter_config, to_commented_yaml
    from recsys_core.errors import InputError

    if file.exists():
        raise InputError(f"{file}: exists already; remove it, or name another file")
    if not file.parent.is_dir():
        raise InputError(f"{file}: there is no folder {file.parent}; make it first")
    file.write_text(to_commented_yaml(starter_config()), encoding="utf-8")
    output.out.print(
        f"wrote {file}; put your paths and columns in, then: nightjar validate {file}", markup=False, soft_wrap=True
    )


@app.command(epilog="Example: nightjar validate nightly.yaml --set model.embedding_dim=128")
def validate(file: File, overrides: Sets = None) -> None:
    """Checks the config, and the files, columns and types of the input, without running."""
    from flows.config_file import load_config

    config = load_config(file, overrides or ())
    from flows.cli.input_checks import check_inputs

    facts = check_inputs(config)
    output.print_facts(facts, console=output.out)
    output.out.print(f"{file}: good; run it with: nightjar run {file}", markup=False, soft_wrap=True)


@app.command(epilog="Example: nightjar doctor")
def doctor(folder: Annotated[Path, typer.Option(help="where the workspace will be")] = Path()) -> None:
    """Says whether versions fit together, and what this machine has."""
    from recsys_core.preflight import inspect

    found = inspect(folder)
    output.print_facts(dict(found.rows), console=output.out)
    for problem in found.problems:
        output.out.print(f"problem: {problem}", style="red", markup=False, soft_wrap=True)
    if found.problems:
        raise typer.Exit(1)
    output.out.print("all well")


@app.command(epilog="Example: nightjar plan nightly.yaml --nodes 2 --gpus-per-node 8 --hbm-gb 80")
def plan(
    file: File,
    overrides: Sets = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="hosts")] = None,
    gpus_per_node: Annotated[int | None, typer.Option(min=1, help="GPUs per host; implies device cuda")] = None,
    hbm_gb: Annotated[float | None, typer.Option(min=0.1, help="memory per GPU")] = None,
    ddr_gb: Annotated[float | None, typer.Option(min=0.1, help="main memory per host")] = None,
    intra_host_gb_s: Annotated[float | None, typer.Option(min=0.1, help="GB/s between two GPUs of a host")] = None,
    inter_host_gb_s: Annotated[float | None, typer.Option(min=0.1, help="GB/s from a GPU to one of another host")] = None,
    hbm_gb_s: Annotated[float | None, typer.Option(min=0.1, help="GB/s of a GPU's memory")] = None,
    as_json: AsJson = False,
) -> None:
    """Plans the sharding for a cluster that need not exist: reads the data, trains nothing, writes plan.json and plan.html."""
    from flows.cli.plan import plan_for, print_plan
    from flows.config_file import load_config

    asked = {"num_nodes": nodes, "processes_per_node": gpus_per_node, "hbm_gb": hbm_gb, "ddr_gb": ddr_gb}
    asked |= {"intra_host_gb_s": intra_host_gb_s, "inter_host_gb_s": inter_host_gb_s, "hbm_gb_s": hbm_gb_s}
    cluster: dict[str, int | float | str] = {name: value for name, value in asked.items() if value is not None}
    if gpus_per_node is not None:
        cluster["device"] = "cuda"
    made, paths = plan_for(load_config(file, overrides or ()), cluster=cluster)
    if as_json:
        sys.stdout.write(made.model_dump_json() + "\n")
    else:
        print_plan(made, paths=paths, console=output.out)


@app.command(epilog="Example: nightjar run nightly.yaml --set training.batch_size=8192 --resume 20261121-070312-ab12")
def run(
    file: File,
    overrides: Sets = None,
    until: Until = None,
    resume: Annotated[str | None, typer.Option(metavar="RUN_ID", help="go on with this run at its first missing stage")] = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """One night: ingest, plan, train, export, evaluate, index, package, register."""
    from flows.prefect_server import embedded_server

    with embedded_server() as server:  # it imports while the config and the input are read
        from flows.cli.input_checks import check_inputs
        from flows.cli.runner import print_outcome, run_night
        from flows.config_file import load_config
        from recsys_core.errors import InputError
        from tasks.run import STAGES

        last = next((stage for stage in STAGES if stage == until), None)
        if until is not None and last is None:
            raise InputError(f"--until {until}: no such stage; there are {', '.join(STAGES)}")
        config = load_config(file, overrides or ())
        check_inputs(config)
        prepare(config.workspace, verbose=verbose)
        command = as_command("run", file, overrides)
        outcome = run_night(config, resume=resume, until=last, server=server, command=command)
    if as_json:
        sys.stdout.write(outcome.as_json() + "\n")
    else:
        print_outcome(outcome, file=file, overrides=overrides or ())


@app.command(epilog="Example: nightjar tune nightly.yaml --trials 40")
def tune(
    file: File,
    overrides: Sets = None,
    trials: Annotated[int | None, typer.Option(min=1, help="trainings in all, instead of tuning.trials")] = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Tries settings within the ranges of `tuning`; the validation split decides. The same command goes on where it stopped."""
    from flows.prefect_server import embedded_server

    with embedded_server() as server:
        from flows.cli.input_checks import check_inputs
        from flows.cli.tune import as_json as to_json
        from flows.cli.tune import check_tunable, print_study, run_study
        from flows.config_file import load_config

        config = load_config(file, overrides or ())
        check_tunable(config, file=file)
        check_inputs(config)
        if trials is not None and config.tuning is not None:
            config = config.model_copy(update={"tuning": config.tuning.model_copy(update={"trials": trials})})
        prepare(config.workspace, verbose=verbose)
        study = run_study(config, server=server, command=as_command("tune", file, overrides, trials=trials))
    if as_json:
        sys.stdout.write(to_json(study) + "\n")
    else:
        print_study(study, file=file)


@app.command(epilog="Example: nightjar query nightly.yaml --user 42 -k 10")
def query(
    file: File,
    user: Annotated[str, typer.Option(help="user id as in the log; unknown users get what is popular")],
    k: Annotated[int, typer.Option("-k", min=1, help="items wanted")] = 10,
    model: Annotated[str | None, typer.Option(metavar="URI", help="another version, e.g. models:/nightjar/3")] = None,
    overrides: Sets = None,
    as_json: AsJson = False,
) -> None:
    """Asks the champion (or --model) what to recommend to a user."""
    from flows.config_file import load_config

    config = load_config(file, overrides or ())
    prepare(config.workspace)
    from flows.cli.query import recommend

    answer = recommend(config, user=user, k=k, model_uri=model)
    if not answer.known_user:
        output.log.print(
            f"user {user} is unknown to version {answer.version}: these are the most popular items",
            markup=False,
            soft_wrap=True,
        )
    if as_json:
        sys.stdout.write(answer.model_dump_json() + "\n")
        return
    output.out.print(f"{answer.model} version {answer.version}, user {user}", markup=False, soft_wrap=True)
    rows = [[str(item.item_id), f"{item.score:.4f}"] for item in answer.items]
    output.print_table(["item", "score"], rows, console=output.out)


@app.command(epilog="Example: nightjar releases nightly.yaml")
def releases(file: File, overrides: Sets = None, as_json: AsJson = False) -> None:
    """The registered versions: alias, served metrics, run."""
    import json

    from flows.config_file import load_config

    config = load_config(file, overrides or ())
    prepare(config.workspace)
    from tasks.registry.mlflow_client import call_with_deadline, connect
    from tasks.registry.releases import list_releases

    client = connect(config.workspace)
    rows = call_with_deadline(lambda: list_releases(client, config.registry.model_name), uri=client.tracking_uri)
    if as_json:
        sys.stdout.write(json.dumps(rows) + "\n")
    elif rows:
        output.print_releases(rows, console=output.out)
    else:
        output.out.print(f"no version of {config.registry.model_name} yet; make one with: nightjar run {file}", soft_wrap=True)


@app.command(epilog="Example: nightjar ui nightly.yaml --mlflow-port 5001")
def ui(
    file: File,
    overrides: Sets = None,
    prefect_port: Annotated[int, typer.Option(help="port of the Prefect UI")] = 4200,
    mlflow_port: Annotated[int, typer.Option(help="port of the MLflow UI")] = 5000,
) -> None:
    """Prefect and MLflow in the browser, on this machine only, until Ctrl-C."""
    from flows.config_file import load_config

    config = load_config(file, overrides or ())
    prepare(config.workspace)
    from flows.cli.ui import serve

    serve(config, prefect_port=prefect_port, mlflow_port=mlflow_port)


def as_command(name: str, file: Path, overrides: list[str] | None, *, trials: int | None = None) -> str:
    """The command line, as a shell takes it.

    >>> as_command("run", Path("nightly.yaml"), ["model.query.layers=[64, 32]"])
    "nightjar run nightly.yaml --set 'model.query.layers=[64, 32]'"
    """
    words = ["nightjar", name, str(file)]
    for override in overrides or ():
        words += ["--set", override]
    return shlex.join(words if trials is None else [*words, "--trials", str(trials)])


def main() -> None:
    """Entry of the `nightjar` command: one clear message and an exit code for what is foreseen."""
    quieten()
    try:
        app()
    except Interrupted as error:
        end_process(error)
    except NightjarError as error:
        output.log.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        forget_frames(error)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
