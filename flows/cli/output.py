"""What a person sees in a terminal: a line per stage, a bar while training, and the tables at the end."""

import logging
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
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
_STAGE_WIDTH, _FACTS_WIDTH, _TOOK_WIDTH, _LEAST_ROOM = 20, 70, 10, 20
"""Columns of a stage line; the facts get what is left."""


class _StageLines(logging.Handler):
    """Draws the records of tasks.reporting: finished stages as lines, the running one as a bar."""

    def __init__(self, bar: Progress) -> None:
        super().__init__(logging.DEBUG)
        self._bar = bar
        self._task = bar.add_task("", total=None, note="")

    def emit(self, record: logging.LogRecord) -> None:
        console, fields = self._bar.console, record.__dict__
        if "done" in fields:
            self._bar.update(self._task, completed=fields["done"], total=fields["total"], note=fields["note"])
        elif "stage" in fields:
            self._bar.reset(self._task, description=fields["stage"], total=None, note="")
        elif "stage_line" in fields:
            console.print(stage_line(*fields["stage_line"], width=console.width), markup=False, soft_wrap=True)
        elif record.levelno >= logging.WARNING:
            name, colour = ("error", "red") if record.levelno >= logging.ERROR else ("warning", "yellow")
            message = folded(f"{name} {record.getMessage()}", width=console.width).removeprefix(name)
            console.print(f"[{colour}]{name}[/]{escape(message)}", soft_wrap=True)
        else:
            console.print(folded(record.getMessage(), width=console.width), markup=False, soft_wrap=True)


def folded(text: str, *, width: int) -> str:
    """The text in lines of at most `width` columns; a longer word, such as a path, stays whole. A file is not folded.

    >>> folded("the config is in /a/long/path.yaml", width=16).splitlines()
    ['the config is in', '/a/long/path.yaml']
    """
    if width >= WIDTH_OF_A_FILE:
        return text
    lines = (textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False) or [""] for line in text.splitlines())
    return "\n".join(chain.from_iterable(lines))


def stage_line(stage: str, facts: str, took: str, *, width: int) -> str:
    """The line of a finished stage; facts that do not fit go on below their start.

    >>> print(stage_line("train", "1,000 steps, loss 0.5000, stopped early after epoch 3 of 10", "1.5 s", width=66))
    train                1,000 steps, loss 0.5000, stopped       1.5 s
                         early after epoch 3 of 10
    """
    room = max(_LEAST_ROOM, min(max(_FACTS_WIDTH, len(facts)), width - _STAGE_WIDTH - _TOOK_WIDTH - 2))
    first, *others = folded(facts, width=room).splitlines() or [""]
    lines = [f"{stage:<{_STAGE_WIDTH}} {first:<{room}} {took:>{_TOOK_WIDTH}}"]
    return "\n".join([*lines, *(" " * (_STAGE_WIDTH + 1) + line for line in others)])


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
                for value, best in zip(values, table.best_comparable(name), strict=True)
            ),
        ]
        for name, values in table.rows.items()
    ]
    print_table(["test", *table.columns], rows, console=console)
    if table.note:
        console.print(table.note, style="dim")


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
