"""Terminal output: a line per stage, a progress bar, tables, and pairs of a name and a value."""

import logging
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from recsys_core.errors import printable

if TYPE_CHECKING:
    from flows.doctor.finding import Finding
    from recsys_core.evaluation.report import MetricTable

UNFOLDED_WIDTH = 200
"""Width of output that does not go to a terminal. At this width, `fold` does not break lines."""
stderr = Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else UNFOLDED_WIDTH)
"""Progress, warnings and errors, on stderr."""
stdout = Console(highlight=False, width=None if sys.stdout.isatty() else UNFOLDED_WIDTH)
"""The result of the command, on stdout."""
_STAGE_WIDTH, _DURATION_WIDTH, _MIN_FACTS_WIDTH, _MAX_FACTS_WIDTH = 19, 9, 20, 90
"""Widths of the columns of a stage line. The remaining width of the terminal is for the facts."""


def printable_lines(text: str) -> str:
    """Escape the control characters of a text that may quote the input, except line ends."""
    return "\n".join(printable(line) for line in text.split("\n"))


class _StageLines(logging.Handler):
    """Prints the log records of tasks.progress.reporting: a line for a finished stage, a bar for the running one."""

    def __init__(self, progress: Progress) -> None:
        super().__init__(logging.DEBUG)
        self._progress = progress
        self._task = progress.add_task("", total=None, note="")

    def emit(self, record: logging.LogRecord) -> None:
        console, fields = self._progress.console, record.__dict__
        if "done" in fields:
            self._progress.update(self._task, completed=fields["done"], total=fields["total"], note=fields["note"])
        elif "stage" in fields:
            self._progress.reset(self._task, description=fields["stage"], total=None, note="")
        elif "stage_line" in fields:
            line = stage_line(*fields["stage_line"], width=console.width)
            console.print(printable_lines(line), markup=False, soft_wrap=True)
        elif "rank" in fields:  # output of a rank: Prefect's log and the log files of the training contain it
            return
        elif record.levelno >= logging.WARNING:
            print_warning(record.getMessage(), is_error=record.levelno >= logging.ERROR)
        else:
            message = fold(printable_lines(record.getMessage()), width=console.width)
            console.print(message, markup=False, soft_wrap=True)


def print_warning(text: str, *, is_error: bool = False) -> None:
    """Print a warning to stderr, or an error after which the command continues."""
    label, colour = ("error", "red") if is_error else ("warning", "yellow")
    message = fold(f"{label} {printable_lines(text)}", width=stderr.width).removeprefix(label)
    stderr.print(f"[{colour}]{label}[/]{escape(message)}", soft_wrap=True)


def fold(text: str, *, width: int) -> str:
    """Fold `text` into lines of at most `width` columns. A longer word, such as a path, is not broken.

    >>> fold("the config is in /a/long/path.yaml", width=16).splitlines()
    ['the config is in', '/a/long/path.yaml']
    """
    if width >= UNFOLDED_WIDTH:
        return text
    lines = (textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False) or [""] for line in text.splitlines())
    return "\n".join(chain.from_iterable(lines))


def stage_line(stage: str, facts: str, duration: str, *, width: int) -> str:
    """Format the line of a finished stage. In a narrow terminal the last facts are left out; Prefect's log has all of them.

    >>> print(stage_line("train", "1,000 steps, loss 0.5000, stopped early after epoch 3 of 10", "1.5 s", width=66))
    train               1,000 steps, loss 0.5000                 1.5 s
    """
    if width >= UNFOLDED_WIDTH:
        facts_width = max(_MAX_FACTS_WIDTH, len(facts))
    else:
        facts_width = min(_MAX_FACTS_WIDTH, max(_MIN_FACTS_WIDTH, width - _STAGE_WIDTH - _DURATION_WIDTH - 2))
    while len(facts) > facts_width and ", " in facts:
        facts = facts.rpartition(", ")[0]
    if len(facts) > facts_width:
        facts = facts[: facts_width - 1] + "…"
    return f"{stage:<{_STAGE_WIDTH}} {facts:<{facts_width}} {duration:>{_DURATION_WIDTH}}"


@contextmanager
def stage_lines() -> Iterator[None]:
    """Print the stages of a run and the progress of each stage to stderr while the body runs."""
    logger = logging.getLogger("nightjar")
    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=12),
        TextColumn("{task.fields[note]}", table_column=Column(no_wrap=True, overflow="ellipsis")),
        TimeRemainingColumn(),
        console=stderr,
        transient=True,
    )
    with progress:
        handler = _StageLines(progress)
        logger.addHandler(handler)
        logging.getLogger("nightjar.steps").setLevel(logging.DEBUG)
        logging.getLogger("recsys_core").addHandler(handler)
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logging.getLogger("recsys_core").removeHandler(handler)


@contextmanager
def log_lines() -> Iterator[None]:
    """Print the log of the library on stderr, for work before a run such as the check of many files."""
    handler, logger = logging.StreamHandler(), logging.getLogger("recsys_core")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def print_metrics(table: "MetricTable", *, served_metrics: Mapping[str, float], console: Console) -> None:
    """Print models and baselines by row and metrics by column. The best value of each column is bold.

    Args:
        served_metrics: metrics of the smoke test by <ranker>/<metric>. The ranker `served` is the new version, and the other
            rankers are baselines.
    """
    rows: list[list[str | Text]] = [
        [
            row_name,
            *(
                Text("-" if value is None else f"{value:.4f}", "bold" if value == best_value else "")
                for value, best_value in zip(row_values, table.best_comparable(row_name), strict=True)
            ),
        ]
        for row_name, row_values in table.rows.items()
    ]
    for ranker in dict.fromkeys(row_name.partition("/")[0] for row_name in served_metrics):
        row_values = [served_metrics.get(f"{ranker}/{column}") for column in table.columns]
        row_name = "served" if ranker == "served" else f"{ranker.removesuffix('_champion')} served"
        rows.append([row_name, *("-" if value is None else f"{value:.4f}" for value in row_values)])
    print_table(["test", *table.columns], rows, console=console)
    for note in filter(None, (table.interval_note, table.note)):
        console.print(note, style="dim")


def print_table(column_titles: Sequence[str], rows: Sequence[Sequence[str | Text]], *, console: Console) -> None:
    """Print a table without borders; the first column is aligned left, the others right. Control characters are escaped."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for index, title in enumerate(column_titles):
        table.add_column(title, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(printable(cell)) for cell in row))
    console.print(table)


def print_facts(facts: Mapping[str, str], *, console: Console) -> None:
    """Print names and values in two columns."""
    name_width = max(len(fact_name) for fact_name in facts)
    for fact_name, fact_text in facts.items():
        console.print(f"[dim]{fact_name.ljust(name_width)}[/]  {escape(printable_lines(fact_text))}", soft_wrap=True)


def print_findings(findings: "Mapping[str, Finding]", *, console: Console) -> None:
    """Print subject, status and text of each finding."""
    name_width, style_by_status = (
        max(len(subject) for subject in findings),
        {"ok": "green", "problem": "red", "not used": "dim"},
    )
    console.print()
    for subject, finding in findings.items():
        status = f"[{style_by_status[finding.status]}]{finding.status:<8}[/]"
        console.print(f"[dim]{subject.ljust(name_width)}[/]  {status}  {escape(printable_lines(finding.text))}", soft_wrap=True)


def print_releases(releases: Sequence[Mapping[str, Any]], *, console: Console) -> None:
    """Print one row per version: alias, creation, served metrics, run and reason."""
    metric_names = sorted(
        {metric_name for release in releases for metric_name in release["metrics"] if metric_name.startswith("served/")}
    )
    rows = [
        [
            str(release["version"]),
            release["alias"] or "-",
            release["created"],
            *(
                f"{release['metrics'][metric_name]:.4f}" if metric_name in release["metrics"] else "-"
                for metric_name in metric_names
            ),
            release["run_id"],
            release["by_hand"] or release["reasons"] or f"smoke test {release['smoke']}",
        ]
        for release in releases
    ]
    titles = [
        "version",
        "alias",
        "created (UTC)",
        *(metric_name.removeprefix("served/") for metric_name in metric_names),
        "run",
        "reason",
    ]
    print_table(titles, rows, console=console)
