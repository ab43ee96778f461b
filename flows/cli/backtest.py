"""`nightjar backtest` and `nightjar gate-noise`: run their flows and print the metrics of each run."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flows.cli import output
from flows.cli.arguments import ConfigOptions
from flows.cli.runner import Command, flow_session, format_command
from flows.runs.before_run import check_inputs
from flows.servers.prefect_server import PrefectServer
from flows.settings.pipeline import PipelineConfig

if TYPE_CHECKING:
    from flows.backtest import Day
    from flows.gate_noise import GateNoise


def run_backtest(options: ConfigOptions, server: PrefectServer | None, *, num_days: int) -> "list[Day]":
    """Run the backtest flow to its end."""

    def load_flow() -> Any:
        from flows.backtest import backtest

        return backtest

    days: list[Day] = _run_flow(load_flow, options, server, name="backtest", count=num_days, option="--days")
    return days


def run_gate_noise(options: ConfigOptions, server: PrefectServer | None, *, num_seeds: int) -> "GateNoise":
    """Run the flow that trains with several seeds to its end."""

    def load_flow() -> Any:
        from flows.gate_noise import measure_gate_noise

        return measure_gate_noise

    noise: GateNoise = _run_flow(load_flow, options, server, name="gate-noise", count=num_seeds, option="--seeds")
    return noise


def _run_flow(
    load_flow: Callable[[], Any], options: ConfigOptions, server: PrefectServer | None, *, name: str, count: int, option: str
) -> Any:
    """Run a flow of the config and a count. name: name of the command, and of its folder in the workspace."""
    loaded = options.prepare()
    check_inputs(loaded.config)
    command = Command(loaded.config, server, format_command(name, loaded, [option, str(count)]))
    folder, how_to_resume = loaded.config.workspace / name, f"resume with: {command.command_line}"
    with flow_session(load_flow, command, run_id=name, folder=folder, how_to_resume=lambda: how_to_resume) as flow:
        return flow(loaded.config, count)


def print_days(config: PipelineConfig, days: "list[Day]") -> None:
    """Print a row per day, and the paths of the results."""
    metric = config.registry.metric
    rankers = ("test", "baseline/popularity", "baseline/zero_shot", "served", "champion")
    rows = []
    for day in days:
        values = [day.metrics.get(f"{ranker}/{metric}") for ranker in rankers]
        shown_values = ["-" if value is None else f"{value:.4f}" for value in values]
        rows.append([f"{day.until:%Y-%m-%d %H:%M}", day.state, day.version or "-", *shown_values])
    titles = ["log until", "ended as", "version", "model", "popularity", "zero-shot", "served", "champion before"]
    output.stdout.print(f"\n[bold]{metric}[/] of each day's run")
    output.print_table(titles, rows, console=output.stdout)
    folder = config.workspace / "backtest"
    facts = {"plot": str(folder / "backtest.png"), "metrics": str(folder / "backtest.json"), "page": str(folder / "index.html")}
    output.print_facts(facts, console=output.stdout)


def print_gate_noise(config: PipelineConfig, noise: "GateNoise") -> None:
    """Print a row per seed, and what the spread means for the margin of the gate."""
    margin = config.registry.gate.max_relative_drop
    chance = f"{100 * noise.chance_of_drop(margin):.1f} %"
    rows = [[str(seed), f"{value:.4f}"] for seed, value in noise.value_by_seed.items()]
    output.print_table(["training.seed", noise.metric], rows, console=output.stdout)
    facts = {
        "mean": f"{noise.mean:.4f}",
        "spread": f"{100 * noise.relative_sd:.1f} % of the mean (standard deviation between seeds)",
        "margin": f"{100 * margin:g} %: an equal training is worse by more in {chance} of the runs, because of its seed alone",
    }
    output.print_facts(facts, console=output.stdout)
