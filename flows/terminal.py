"""What a person sees in a terminal: a line per stage, a bar while training, and the tables at the end."""

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from recsys_core.evaluation.report import MetricTable

WIDTH_OF_A_FILE = 200
"""Columns where the output goes to no terminal: nothing is folded."""
log = Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else WIDTH_OF_A_FILE)
"""Everything that is not the answer goes here."""
out = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH_OF_A_FILE)
"""The answer."""


class _StageLines(logging.Handler):
    """Draws the records of tasks.reporting: finished stages as lines, the running one as a bar."""

    def __init__(self, bar: Progress) -> None:
        super().__init__(logging.DEBUG)
        self._bar = bar
        self._task = bar.add_task("", total=None, note="")

    def emit(self, record: logging.LogRecord) -> None:
        stage, progress = getattr(record, "stage", None), getattr(record, "progress", None)
        if progress is not None:
            note = f"epoch {progress.epoch}  loss {progress.loss:.4f}  {progress.samples_per_s:,.0f} samples/s"
            self._bar.update(self._task, completed=progress.step, total=progress.total_steps, note=note)
        elif stage is not None:
            self._bar.reset(self._task, description=stage, total=None, note="")
        elif record.levelno >= logging.WARNING:
            self._bar.console.print(f"[yellow]warning[/] {escape(record.getMessage())}", soft_wrap=True)
        else:
            self._bar.console.print(record.getMessage(), markup=False, soft_wrap=True)


@contextmanager
def stage_lines() -> Iterator[None]:
    """Shows a run's progress on stderr while the body runs."""
    logger = logging.getLogger("nightjar")
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=log,
        transient=True,
    )
    with bar:
        handler = _StageLines(bar)
        logger.addHandler(handler)
        logging.getLogger("nightjar.steps").setLevel(logging.DEBUG)
        logging.getLogger("recsys_core").addHandler(handler)
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logging.getLogger("recsys_core").removeHandler(handler)


def print_metrics(table: MetricTable, *, console: Console) -> None:
    """Contenders by row, metrics by column, the best of each column in bold; cold items have a best of their own."""
    rows: list[list[str | Text]] = [
        [
            name,
            *(
                Text("-" if value is None else f"{value:.4f}", "bold" if value == best else "")
                for value, best in zip(values, table.best_beside(name), strict=True)
            ),
        ]
        for name, values in table.rows.items()
    ]
    print_table(["test", *table.columns], rows, console=console)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str | Text]], *, console: Console) -> None:
    """A plain table; the first column left, numbers right."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in row))
    console.print(table)


def print_facts(facts: Mapping[str, str], *, console: Console) -> None:
    """Two columns: what, and its value."""
    width = max(len(name) for name in facts)
    for name, value in facts.items():
        console.print(f"[dim]{name.ljust(width)}[/]  {escape(value)}", soft_wrap=True)


def print_releases(releases: Sequence[Mapping[str, Any]], *, console: Console) -> None:
    """One row per version: alias, when, served metrics, why."""
    names = sorted({name for release in releases for name in release["metrics"] if name.startswith("served/")})
    rows = [
        [
            str(release["version"]),
            release["alias"] or "-",
            release["created"],
            *(f"{release['metrics'][name]:.4f}" if name in release["metrics"] else "-" for name in names),
            release["run_id"],
            release["reasons"] or f"smoke test {release['smoke']}",
        ]
        for release in releases
    ]
    columns = ["version", "alias", "made (UTC)", *(name.removeprefix("served/") for name in names), "run", "why"]
    print_table(columns, rows, console=console)
