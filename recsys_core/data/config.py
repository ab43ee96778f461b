"""What the user says about the log."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from recsys_core.config import Frozen, Paths


class TimeSplit(Frozen):
    """The last days are the test, the days before them the validation."""

    kind: Literal["time"] = "time"
    test_days: float = Field(1.0, gt=0, description="length of the test period before the newest event, in days")
    validation_days: float = Field(1.0, ge=0, description="length of the validation period before the test period, in days")


class LeaveLastOut(Frozen):
    """A user's last event is the test, the one before it the validation (the usual protocol of the literature)."""

    kind: Literal["leave_last_out"] = "leave_last_out"
    min_events: int = Field(3, ge=3, description="users with fewer events are kept for training only")


class GivenSplit(Frozen):
    """`interactions.paths` is the training log; test (and validation) come from files of their own."""

    kind: Literal["files"] = "files"
    test: Paths = Field(min_length=1, description="parquet files or globs with the test events")
    validation: Paths | None = Field(None, description="parquet files or globs with the validation events")
    validation_share: float = Field(
        0.0, ge=0, lt=1, description="without validation files: share of each training log held out, by hash of (user, item)"
    )

    @model_validator(mode="after")
    def _one_validation(self) -> Self:
        if self.validation is not None and self.validation_share > 0:
            raise ValueError("set validation or validation_share, not both")
        return self


Split = Annotated[TimeSplit | LeaveLastOut | GivenSplit, Field(discriminator="kind")]


class InteractionsConfig(Frozen):
    """The interaction log in parquet, and how it is split."""

    paths: Paths = Field(min_length=1, description="parquet file or glob, or a list of them")
    user_column: str = Field("user_id", description="column with the user id (integer or string)")
    item_column: str = Field("item_id", description="column with the item id (integer or string)")
    timestamp_column: str | None = Field(
        None, description="column with the event time (timestamp, date, or integer with timestamp_unit)"
    )
    timestamp_unit: Literal["s", "ms", "us", "ns"] = Field("s", description="unit of an integer timestamp column")
    order_column: str | None = Field(None, description="column that orders a user's events where there is no time")
    label_column: str | None = Field(
        None, description="column with a rating or label; events below label_threshold are left out"
    )
    label_threshold: float | None = Field(None, description="events with label >= this are positives")
    split: Split = Field(default_factory=TimeSplit, description="how training, validation and test events are told apart")
    memory_limit: str = Field(
        "2GB", pattern=r"^\d+(\.\d+)?\s*[KMGT]i?B$", description="memory DuckDB may use; beyond it spills to disk"
    )
    threads: int | None = Field(None, ge=1, description="threads of DuckDB; all cores when empty")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.label_column is None) != (self.label_threshold is None):
            raise ValueError("label_column and label_threshold go together: set both or neither")
        if self.timestamp_column is not None and self.order_column is not None:
            raise ValueError("set timestamp_column or order_column, not both")
        if self.split.kind == "time" and self.timestamp_column is None:
            raise ValueError("split.kind is time, which needs timestamp_column; set it, or use leave_last_out or files")
        if self.split.kind == "leave_last_out" and self.timestamp_column is None and self.order_column is None:
            raise ValueError("split.kind is leave_last_out, which needs timestamp_column or order_column")
        return self

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are read."""
        named = (self.user_column, self.item_column, self.timestamp_column, self.order_column, self.label_column)
        return tuple(column for column in named if column is not None)

    @property
    def ordered(self) -> bool:
        """Whether a user's events have an order, so that a history is what came before."""
        return self.timestamp_column is not None or self.order_column is not None
