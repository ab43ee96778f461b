"""Schema of report.json."""

from recsys_core.config import Frozen
from recsys_core.data_report.drift import Mover
from recsys_core.data_report.limits import Check
from recsys_core.manifests import ColumnFacts


class Day(Frozen):
    """Number of events of one UTC day in each part of the split."""

    day: str
    train: int
    validation: int
    test: int


class DataReport(Frozen):
    """The content of report.json. Fields named `previous_...` are empty for the first run."""

    compared_with: str | None
    """Name of the previous run."""
    num_vocabulary_runs: int
    """Number of runs with the current vocabulary: the run that built it, and the runs that continued it."""
    rebuild_reason: str | None
    """Why the vocabulary was rebuilt; None if it was continued."""
    first_time: str | None
    """Time of the first event; None without timestamps."""
    last_time: str | None
    """Time of the last event; None without timestamps."""
    split: str
    """Kind of the split: time, leave_last_out or files."""
    num_files: int
    num_rows: int
    num_files_read: int
    num_rows_read: int
    metrics: dict[str, float]
    """Metrics that could be measured."""
    previous_metrics: dict[str, float]
    checks: tuple[Check, ...]
    breaches: tuple[str, ...]
    warnings: tuple[str, ...]
    columns: dict[str, ColumnFacts]
    removed_events: dict[str, int]
    """Number of events that a filter removed, by filter."""
    bad_rows: dict[str, int]
    """Number of events that were removed because of a bad value, by reason."""
    days: tuple[Day, ...]
    history_lengths: tuple[tuple[str, int], ...]
    """(range of the number of training events, number of users in this range)."""
    popularity: tuple[tuple[int, float], ...]
    """(popularity rank from 1, share of the training events), for some ranks."""
    previous_popularity: tuple[tuple[int, float], ...]
    movers: tuple[Mover, ...]
