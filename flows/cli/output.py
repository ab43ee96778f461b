"""Terminal output: a line per stage, a progress bar, tables, and texts with labels."""

import logging
import os
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from recsys_core.errors import printable


def _open_closed_streams() -> None:
    """Redirect stdin, stdout and stderr to the null device if the caller has closed them, as `nightjar run >&-` does.

    Otherwise a file that the command opens would get the file descriptor of the stream.
    """
    for descriptor, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            os.open(os.devnull, os.O_RDWR)  # gets the smallest free descriptor
            setattr(sys, name, os.fdopen(descriptor, mode, encoding="utf-8", closefd=False))


_open_closed_streams()
UNFOLDED_WIDTH = 200
"""Width of output that does not go to a terminal. At this width, `fold` does not break lines."""
stderr = Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else UNFOLDED_WIDTH)
"""Progress, warnings and errors, on stderr."""
stdout = Console(highlight=False, width=None if sys.stdout.isatty() else UNFOLDED_WIDTH)
"""The result of the command, on stdout."""
_UNLIMITED_WIDTH = 1 << 20
_MAX_UNFOLDED_CELL_WIDTH, _MIN_TEXT_WIDTH = 40, 30
"""A table cell up to the first width is never folded. A column with a longer cell is at least as wide as the second width."""
_STAGE_WIDTH, _DURATION_WIDTH, _MIN_SUMMARY_WIDTH, _MAX_SUMMARY_WIDTH = 19, 9, 20, 90
"""Widths of the columns of a stage line. The remaining width of the terminal is for the summary."""


def printable_lines(text: str) -> str:
    """Escape the control characters of a text that may quote the input, except line ends."""
    return "\n".join(printable(line) for line in text.split("\n"))


class _StageLines(logging.Handler):
    """Prints the log records of tasks.progress.reporting: a line for a finished stage, and a bar for the running stage."""

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


def stage_line(stage: str, summary: str, duration: str, *, width: int) -> str:
    """Format the line of a finished stage. In a narrow terminal, the summary is shortened; Prefect's log has the whole summary.

    >>> print(stage_line("train", "1,000 steps, loss 0.5000, stopped early after epoch 3 of 10", "1.5 s", width=66))
    train               1,000 steps, loss 0.5000                 1.5 s
    """
    if width >= UNFOLDED_WIDTH:
        summary_width = max(_MAX_SUMMARY_WIDTH, len(summary))
    else:
        summary_width = min(_MAX_SUMMARY_WIDTH, max(_MIN_SUMMARY_WIDTH, width - _STAGE_WIDTH - _DURATION_WIDTH - 2))
    while len(summary) > summary_width and ", " in summary:
        summary = summary.rpartition(", ")[0]
    if len(summary) > summary_width:
        summary = summary[: summary_width - 1] + "…"
    return f"{stage:<{_STAGE_WIDTH}} {summary:<{summary_width}} {duration:>{_DURATION_WIDTH}}"


@contextmanager
def printed_stages() -> Iterator[None]:
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
        disable=not stderr.is_terminal,  # a bar would leave an empty line in a file
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
def printed_log() -> Iterator[None]:
    """Print the log of recsys_core on stderr while the body runs, for work outside a run such as checking input files."""
    handler, logger = logging.StreamHandler(), logging.getLogger("recsys_core")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def print_table(
    column_titles: Sequence[str], rows: Sequence[Sequence[str | Text]], *, left_columns: Sequence[int] = (0,)
) -> None:
    """Print a table without borders. Control characters are escaped.

    If the table is wider than the terminal, only titles and long texts are folded. Ids and numbers are never cut, so the lines
    may be longer than the terminal is wide. A table that does not go to a terminal is not folded.

    Args:
        left_columns: indices of the columns that are aligned left. All other columns are aligned right.
    """
    table = Table(box=None, pad_edge=False, header_style="dim")
    for index, title in enumerate(column_titles):
        table.add_column(title, justify="left" if index in left_columns else "right")
    text_rows = [[cell if isinstance(cell, Text) else Text(printable(cell)) for cell in row] for row in rows]
    for text_row in text_rows:
        table.add_row(*text_row)
    full_width = stdout.measure(table, options=stdout.options.update(width=_UNLIMITED_WIDTH)).maximum
    if stdout.width >= UNFOLDED_WIDTH and not stdout.is_terminal:
        table.width = full_width
    elif stdout.width < full_width:
        table.width = max(stdout.width, _set_short_column_widths(table, text_rows))
    stdout.print(table, crop=False)


def _set_short_column_widths(table: Table, text_rows: Sequence[Sequence[Text]]) -> int:
    """Set the width of each column without long texts, so that only its title is folded. Return the smallest table width."""
    table_width = 2 * (len(table.columns) - 1)  # two blanks between columns
    for index, column in enumerate(table.columns):
        cell_width = max((row[index].cell_len for row in text_rows), default=0)
        if cell_width > _MAX_UNFOLDED_CELL_WIDTH:
            table_width += _MIN_TEXT_WIDTH
        else:
            column.width = max(cell_width, *map(len, str(column.header).split()))
            table_width += column.width
    return table_width


def print_labelled(text_by_label: Mapping[str, str], *, status_by_label: Mapping[str, str] | None = None) -> None:
    """Print labels and texts in two columns.

    Args:
        status_by_label: a status before each text, with markup.
    """
    label_width = max(len(label) for label in text_by_label)
    for label, text in text_by_label.items():
        status = f"  {status_by_label[label]}" if status_by_label else ""
        stdout.print(f"[dim]{label.ljust(label_width)}[/]{status}  {escape(printable_lines(text))}", soft_wrap=True)


def print_line(text: str, *, style: str = "", console: Console | None = None) -> None:
    """Print a text that may contain brackets, without folding it, and escape its control characters.

    Args:
        console: `stdout` by default.
    """
    (console or stdout).print(printable_lines(text), style=style, markup=False, soft_wrap=True)


def print_json(text: str) -> None:
    """Print the JSON object of the option --json."""
    sys.stdout.write(text + "\n")
