"""`nightjar backtest`: run the backtest flow and print the metrics of each day."""

from typing import TYPE_CHECKING, Any

from flows.cli import output
from flows.cli.runner import Command, flow_session

if TYPE_CHECKING:
    from flows.backtest import Day


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
