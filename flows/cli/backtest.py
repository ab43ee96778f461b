"""`nightjar backtest` and `nightjar gate-noise`: run their flows and print the metrics of each run."""

from typing import TYPE_CHECKING, Any

from flows.cli import output
from flows.cli.runner import Command, flow_session

if TYPE_CHECKING:
    from flows.backtest import Day
    from flows.gate_noise import GateNoise


def run_backtest(command: Command, *, num_days: int) -> "list[Day]":
    """Run the backtest flow to its end."""

    def load_flow() -> Any:
        from flows.backtest import backtest

        return backtest

    folder, how_to_resume = command.config.workspace / "backtest", f"resume with: {command.command_line}"
    with flow_session(load_flow, command, run_id="backtest", folder=folder, how_to_resume=lambda: how_to_resume) as flow:
        days: list[Day] = flow(command.config, num_days)
    return days


def print_days(command: Command, days: "list[Day]") -> None:
    """Print a row per day, and the paths of the results."""
    metric = command.config.registry.metric
    rankers = ("test", "baseline/popularity", "baseline/zero_shot", "served", "champion")
    rows = [
        [
            f"{day.until:%Y-%m-%d %H:%M}",
            day.state,
            day.version or "-",
            *(
                f"{value:.4f}" if value is not None else "-"
                for value in (day.metrics.get(f"{name}/{metric}") for name in rankers)
            ),
        ]
        for day in days
    ]
    titles = ["log until", "ended as", "version", "model", "popularity", "zero-shot", "served", "champion before"]
    output.stdout.print(f"\n[bold]{metric}[/] of each day's run")
    output.print_table(titles, rows, console=output.stdout)
    folder = command.config.workspace / "backtest"
    facts = {"plot": str(folder / "backtest.png"), "metrics": str(folder / "backtest.json"), "page": str(folder / "index.html")}
    output.print_facts(facts, console=output.stdout)


def run_gate_noise(command: Command, *, num_seeds: int) -> "GateNoise":
    """Run the flow that trains with several seeds to its end."""

    def load_flow() -> Any:
        from flows.gate_noise import measure_gate_noise

        return measure_gate_noise

    folder, how_to_resume = command.config.workspace / "gate-noise", f"resume with: {command.command_line}"
    with flow_session(load_flow, command, run_id="gate-noise", folder=folder, how_to_resume=lambda: how_to_resume) as flow:
        noise: GateNoise = flow(command.config, num_seeds)
    return noise


def print_gate_noise(command: Command, noise: "GateNoise") -> None:
    """Print a row per seed, and what the spread means for the margin of the gate."""
    margin = command.config.registry.gate.max_relative_drop
    chance = f"{100 * noise.chance_of_drop(margin):.1f} %"
    rows = [[str(seed), f"{value:.4f}"] for seed, value in noise.value_by_seed.items()]
    output.print_table(["training.seed", noise.metric], rows, console=output.stdout)
    facts = {
        "mean": f"{noise.mean:.4f}",
        "spread": f"{100 * noise.relative_sd:.1f} % of the mean (standard deviation between seeds)",
        "margin": f"{100 * margin:g} %: an equal training is worse by more in {chance} of the runs, because of its seed alone",
    }
    output.print_facts(facts, console=output.stdout)
