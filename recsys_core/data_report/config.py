"""Limits on the ingested data, checked before training."""

from pydantic import Field

from recsys_core.config import MAX_COUNT, Settings


class DataReportConfig(Settings):
    """Limits on the ingested data. A run whose data breaks a limit stops before training, with exit code 2.

    A value without a limit is only reported.
    "Previous run" is the newest earlier run in the workspace that broke no limit. Limits that compare two runs do not apply to
    the first run.
    """

    min_train_events: int | None = Field(
        None, ge=1, le=1_000 * MAX_COUNT, description="smallest allowed number of training events"
    )
    min_validation_users: int | None = Field(
        50,
        ge=1,
        le=MAX_COUNT,
        description="smallest allowed number of users with a validation event. A split without a validation part has no such "
        "limit",
    )
    min_test_users: int | None = Field(
        50,
        ge=1,
        le=MAX_COUNT,
        description="smallest allowed number of users with a test event. With fewer users, metrics of two versions differ by "
        "chance alone",
    )
    max_event_drop_share: float | None = Field(
        0.5,
        gt=0,
        le=1,
        description="largest allowed decrease of the number of training events since the previous run, as a share of the "
        "previous run's number",
    )
    max_new_user_share: float | None = Field(
        None, ge=0, le=1, description="largest allowed share of users that had no event in the previous run"
    )
    max_new_item_share: float | None = Field(
        None, ge=0, le=1, description="largest allowed share of items that had no event in the previous run"
    )
    max_vanished_user_share: float | None = Field(
        None, ge=0, le=1, description="largest allowed share of the previous run's users that have no event in this run"
    )
    max_vanished_item_share: float | None = Field(
        None, ge=0, le=1, description="largest allowed share of the previous run's items that have no event in this run"
    )
    max_popularity_psi: float | None = Field(
        None,
        gt=0,
        le=1_000,
        description="largest allowed population stability index (PSI) between the item popularities of this run and the "
        "previous run. By a common rule of thumb, a PSI of 0.1 is a moderate shift and 0.25 a major shift. From "
        "0.1 on, the report has a warning",
    )
    min_item_vector_share: float | None = Field(
        None, ge=0, le=1, description="smallest allowed share of items with a pretrained vector"
    )
    max_null_share: float | None = Field(
        None, ge=0, le=1, description="largest allowed share of nulls in any column of the log"
    )
    max_duplicate_share: float | None = Field(
        None, ge=0, le=1, description="largest allowed share of events with the same user, item and time as another event"
    )
    max_leaked_event_share: float | None = Field(
        0.01,
        ge=0,
        le=1,
        description="largest allowed share of validation and test events that also occur in an earlier part of the split",
    )
    max_train_after_test_share: float | None = Field(
        None,
        ge=0,
        le=1,
        description="largest allowed share of training events that are later than the first test event of the same user",
    )
    max_split_violations: int | None = Field(
        0,
        ge=0,
        le=1_000 * MAX_COUNT,
        description="largest allowed number of events in the wrong part of the split, for example training events after "
        "the start of the test period",
    )
    max_unseen_item_share: float | None = Field(
        None, ge=0, le=1, description="largest allowed share of test events whose item has no training event"
    )
    max_unseen_user_share: float | None = Field(
        None, ge=0, le=1, description="largest allowed share of test users without a training event"
    )
    max_repeated_pair_share: float | None = Field(
        None,
        ge=0,
        le=1,
        description="largest allowed share of test events whose user already has a training event with the same item",
    )
