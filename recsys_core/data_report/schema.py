"""What a data report says, as report.json has it and report.html shows it."""

from recsys_core.config import Frozen
from recsys_core.data_report.drift import Mover
from recsys_core.data_report.limits import Check
from recsys_core.manifests import ColumnFacts


class Day(Frozen):
    """Events of one UTC day, by part of the split."""

    day: str
    train: int
    validation: int
    test: int


class DataReport(Frozen):
    """report.json; report.html shows the same."""

    compared_with: str | None
    night: int
    rebuilt: str | None
    first_time: str | None
    last_time: str | None
    split: str
    files: int
    rows: int
    files_read: int
    rows_read: int
    metrics: dict[str, float]
    """What could be measured."""
    last_metrics: dict[str, float]
    """The same of last night; empty without one."""
    checks: tuple[Check, ...]
    breaches: tuple[str, ...]
    warnings: tuple[str, ...]
    columns: dict[str, ColumnFacts]
    set_aside: dict[str, int]
    bad_rows: dict[str, int]
    days: tuple[Day, ...]
    history_lengths: tuple[tuple[str, int], ...]
    """Users by number of training events, in classes."""
    popularity: tuple[tuple[int, float], ...]
    """Share of the training events of the item with the n-th most of them, at some n."""
    last_popularity: tuple[tuple[int, float], ...]
    movers: tuple[Mover, ...]
