"""What the user says about the log."""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from recsys_core.config import MANY, MOST_DAYS, OPERATIONAL, Checksums, Column, Paths, Settings

SPLITS = ("train", "validation", "test")
"""The code of a split is its index here; the events of a user are stored in this order."""

_UNITS = {"K": 1_000, "M": 1_000_000, "G": 1_000_000_000, "T": 1_000_000_000_000}


def _as_memory(limit: str) -> str:
    amount, unit = limit.rstrip("KMGTiB "), next(char for char in limit if char in _UNITS)
    if not 1_000_000 <= float(amount) * _UNITS[unit] <= 1e15:
        raise ValueError(f"is {limit}; give at least 1MB and at most 1000TB")
    return limit


Label = Annotated[float, Field(ge=-1e30, le=1e30)]
MemoryLimit = Annotated[
    str, Field(max_length=20, pattern=r"^[0-9]{1,6}(\.[0-9]{1,6})? ?[KMGT]i?B$"), AfterValidator(_as_memory)
]


class TimeSplit(Settings):
    """The last days are the test, the days before them the validation."""

    kind: Literal["time"] = "time"
    test_days: float = Field(1.0, gt=0, le=MOST_DAYS, description="length of the test period before the newest event, in days")
    validation_days: float = Field(
        1.0, ge=0, le=MOST_DAYS, description="length of the validation period before the test period, in days"
    )


class LeaveLastOut(Settings):
    """A user's last event is the test, the one before it the validation (the usual protocol of the literature)."""

    kind: Literal["leave_last_out"] = "leave_last_out"
    min_events: int = Field(3, ge=3, le=MANY, description="users with fewer events are kept for training only")


class GivenSplit(Settings):
    """`interactions.paths` is the training log; test (and validation) come from files of their own."""

    kind: Literal["files"] = "files"
    test: Paths = Field(min_length=1, description="parquet files or globs with the test events")
    validation: Paths | None = Field(None, description="parquet files or globs with the validation events")
    validation_share: float = Field(
        0.0, ge=0, lt=1, description="without validation files: share of the training log held out, by hash (see validation_by)"
    )
    validation_by: Literal["pair", "item"] = Field(
        "pair",
        description="what validation_share is a share of: pairs of user and item, or items, each with all its training events: "
        "then validation tells how the model does on items without an interaction",
    )

    @model_validator(mode="after")
    def _one_validation(self) -> Self:
        if self.validation is not None and self.validation_share > 0:
            raise ValueError("set validation or validation_share, not both")
        if self.validation_by == "item" and self.validation_share == 0:
            raise ValueError(
                "validation_by is item, but validation_share is 0: no item would be held out; set validation_share, or leave "
                "validation_by out"
            )
        return self


Split = Annotated[TimeSplit | LeaveLastOut | GivenSplit, Field(discriminator="kind")]


class LogFilter(Settings):
    """Which events of the log count. Applied in the order of the fields; all counts are of events inside the window."""

    window_days: float | None = Field(
        None, gt=0, le=MOST_DAYS, description="rolling window: only the newest N days of the log; empty: all"
    )
    duplicates: Literal["keep", "exact", "first", "last"] = Field(
        "keep",
        description="keep all; exact: drop repeats of user, item and time; first or last: one event per user and item",
    )
    bot_threshold: int | None = Field(
        None, ge=1, le=MANY, description="users with more events than this are no people: set aside and counted"
    )
    min_user_events: int = Field(1, ge=1, le=MANY, description="users with fewer events are left out")
    min_item_events: int = Field(
        1, ge=1, le=MANY, description="items with fewer events are left out; both minimums hold at the end (k-core)"
    )
    max_user_events: int | None = Field(None, ge=1, le=MANY, description="a user's newest N events; older ones are left out")


class VocabularyConfig(Settings):
    """Whether last night's numbering of users and items is continued: an id keeps its row, new ids are appended."""

    rebuild: Literal["when_due", "always"] = Field(
        "when_due", description="number anew, by falling frequency, only when due; or every night"
    )
    rebuild_after_runs: int = Field(30, ge=1, le=10_000, description="due after this many nights with the same numbering")
    max_idle_share: float = Field(
        0.5, gt=0, le=1, description="due when this share of the users or items had no event (nor vector) last night"
    )


class InteractionsConfig(Settings):
    """The interaction log in parquet, and how it is split."""

    paths: Paths = Field(min_length=1, description="parquet file, folder or glob, or a list of them; local, s3:// or gs://")
    user_column: Column = Field("user_id", description="column with the user id (integer or string)")
    item_column: Column = Field("item_id", description="column with the item id (integer or string)")
    timestamp_column: Column | None = Field(
        None, description="column with the event time (timestamp, date, or integer with timestamp_unit)"
    )
    timestamp_unit: Literal["s", "ms", "us", "ns"] = Field("s", description="unit of an integer timestamp column")
    max_future_days: float = Field(
        1.0, ge=0, le=MOST_DAYS, description="an event later than now by more than this is a bad row"
    )
    order_column: Column | None = Field(None, description="column that orders a user's events where there is no time")
    label_column: Column | None = Field(
        None, description="column with a rating or label; events below label_threshold are left out"
    )
    label_threshold: Label | None = Field(None, description="events with label >= this are positives")
    label_range: tuple[Label, Label] | None = Field(None, description="smallest and largest label; one outside is a bad row")
    weight_column: Column | None = Field(None, description="column with how much an event counts in the loss, 0 or more")
    context_columns: tuple[Column, ...] = Field(
        (), max_length=1_000, description="further columns that are kept per event, for context features"
    )
    split: Split = Field(default_factory=TimeSplit, description="how training, validation and test events are told apart")
    filter: LogFilter = Field(default_factory=LogFilter, description="which events count")
    vocabulary: VocabularyConfig = Field(
        default_factory=VocabularyConfig, description="continue last night's numbering, or not"
    )
    checksums: Checksums = "pages"
    on_bad_rows: Literal["fail", "drop"] = Field(
        "fail", description="a null id, a time out of range, a label that is no number: stop, or drop and count the row"
    )
    max_bad_share: float = Field(
        0.01, ge=0, lt=1, description="on_bad_rows: drop stops all the same above this share of bad rows"
    )
    max_expansion_ratio: Annotated[int, OPERATIONAL] = Field(
        1_000,
        ge=1,
        le=MANY,
        description="a file that unpacks to more than 1 GiB and this many times its size is refused unread",
    )
    memory_limit: Annotated[MemoryLimit, OPERATIONAL] = Field(
        "1GB", description="memory DuckDB may use; beyond it spills to disk"
    )
    threads: Annotated[int | None, OPERATIONAL] = Field(
        None, ge=1, le=1_024, description="threads of DuckDB; all cores when empty"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        ids = {"user_column": self.user_column, "item_column": self.item_column}
        if self.user_column == self.item_column:
            raise ValueError(f"user_column and item_column are both {self.user_column!r}; name the column of each")
        for setting, column in ids.items():
            for other in ("timestamp_column", "order_column"):
                if column == getattr(self, other):
                    raise ValueError(f"{setting} and {other} are both {column!r}; name the column of each")
        if (self.label_column is None) != (self.label_threshold is None):
            raise ValueError("label_column and label_threshold go together: set both or neither")
        if self.label_range is not None and self.label_column is None:
            raise ValueError("label_range is set, but label_column is not; set both or neither")
        if self.label_range is not None and self.label_range[0] >= self.label_range[1]:
            raise ValueError(f"label_range is {list(self.label_range)}: the first number has to be below the second")
        if self.timestamp_column is not None and self.order_column is not None:
            raise ValueError("set timestamp_column or order_column, not both")
        if self.split.kind == "time" and self.timestamp_column is None:
            raise ValueError("split.kind is time, which needs timestamp_column; set it, or use leave_last_out or files")
        if self.split.kind == "leave_last_out" and not self.ordered:
            raise ValueError("split.kind is leave_last_out, which needs timestamp_column or order_column")
        if self.filter.window_days is not None and self.timestamp_column is None:
            raise ValueError("filter.window_days needs timestamp_column; set it, or leave window_days out")
        if not self.ordered and (self.filter.max_user_events is not None or self.filter.duplicates in ("first", "last")):
            raise ValueError(
                "filter.max_user_events and filter.duplicates first or last need timestamp_column or order_column, to tell "
                "which event is the older one"
            )
        return self

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are read, each once."""
        named = (
            self.user_column,
            self.item_column,
            self.timestamp_column,
            self.order_column,
            self.label_column,
            self.weight_column,
            *self.context_columns,
        )
        return tuple(dict.fromkeys(column for column in named if column is not None))

    @property
    def ordered(self) -> bool:
        """Whether a user's events have an order, so that a history is what came before."""
        return self.timestamp_column is not None or self.order_column is not None
