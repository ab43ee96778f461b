"""Settings of the split of the log into training, validation and test events."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from recsys_core.config import MAX_COUNT, MAX_DAYS, Paths, Settings


class TimeSplit(Settings):
    """Split by time: the last days of the log are the test split, the days before them the validation split."""

    kind: Literal["time"] = Field(
        "time", description="The last days of the log are the test period, and the days before it are the validation period"
    )
    test_days: Annotated[float, Field(gt=0, le=MAX_DAYS)] | Literal["auto"] = Field(
        "auto",
        description="Length of the test period in days. The period ends at the newest event of the log or at "
        "`interactions.filter.until`, whichever is earlier. With `auto`, the length is the smallest number of whole days in "
        "which `test_users` users (or all users, if there are fewer) have events. It is at most a fifth of the log's time "
        "span, but always at least one day",
    )
    test_users: int = Field(
        5_000,
        ge=1,
        le=MAX_COUNT,
        description="Number of test users that is enough for `test_days: auto`. With too few test users, the comparison with "
        "the champion has no clear result, and the new version is not promoted",
    )
    validation_days: float = Field(
        1.0,
        ge=0,
        le=MAX_DAYS,
        description="Length of the validation period in days. The period ends where the test period starts",
    )

    @property
    def has_validation(self) -> bool:
        """Whether the split has a validation part."""
        return self.validation_days > 0


class LeaveLastOut(Settings):
    """Leave-last-out split: the last event of each user is a test event, and the event before it a validation event."""

    kind: Literal["leave_last_out"] = Field(
        "leave_last_out",
        description="The last event of each user is a test event, and the second-to-last event is a validation event",
    )
    min_events: int = Field(
        3,
        ge=3,
        le=MAX_COUNT,
        description="Users with fewer events than this have training events only",
    )
    num_folds: int = Field(
        1,
        ge=1,
        le=1_000,
        description="Number of folds of a cross-validation by user. A hash assigns each user to a fold, and only the users of "
        "one fold have validation and test events",
    )
    fold: int = Field(0, ge=0, le=999, description="Fold with the validation and test events, from 0 to `num_folds` - 1")

    @model_validator(mode="after")
    def _fold_exists(self) -> Self:
        if self.fold >= self.num_folds:
            raise ValueError(
                f"fold is {self.fold}, but num_folds is {self.num_folds}; set fold to at most {self.num_folds - 1}"
            )
        return self

    @property
    def has_validation(self) -> bool:
        """Whether the split has a validation part."""
        return True


class FileSplit(Settings):
    """Split by files: `interactions.paths` lists the training files. Test and validation events are in other files."""

    kind: Literal["files"] = Field(
        "files", description="`interactions.paths` has the training events. The test and validation events are in other files"
    )
    test_paths: Paths = Field(min_length=1, description="Parquet files or globs with the test events")
    validation_paths: Paths | None = Field(None, description="Parquet files or globs with the validation events")
    validation_share: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Share of the training events that become validation events, if there are no validation files. A hash of "
        "the ids selects these events (see `validation_unit`)",
    )
    validation_unit: Literal["pair", "item"] = Field(
        "pair",
        description="Whether `validation_share` selects pairs of user and item (`pair`) or items (`item`). With `item`, all "
        "events of a selected item become validation events. The validation metrics then measure "
        "the recommendation of items without a training event",
    )

    @property
    def has_validation(self) -> bool:
        """Whether the split has a validation part."""
        return self.validation_paths is not None or self.validation_share > 0

    @model_validator(mode="after")
    def _validation_settings_fit_together(self) -> Self:
        if self.validation_paths is not None and self.validation_share > 0:
            raise ValueError("set validation_paths or validation_share, not both")
        if self.validation_unit == "item" and self.validation_share == 0:
            raise ValueError(
                "validation_unit is item, but validation_share is 0, so no item would be held out; set validation_share, "
                "or remove validation_unit"
            )
        return self


Split = Annotated[TimeSplit | LeaveLastOut | FileSplit, Field(discriminator="kind")]
