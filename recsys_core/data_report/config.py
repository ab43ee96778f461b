"""What the user allows the night's data to be before a night is stopped."""

from pydantic import Field

from recsys_core.config import MANY, Settings


class DataReportConfig(Settings):
    """Limits on the data of a night; beyond one of them it ends before training, with exit code 2. Empty: reported only.

    "Last night" is the newest earlier run in the workspace whose data passed its report; without one, limits that compare
    two nights are not applied.
    """

    min_events: int | None = Field(None, ge=1, le=1_000 * MANY, description="fewest training events")
    max_event_drop_share: float | None = Field(
        0.5, gt=0, le=1, description="by how large a share training events may fall from last night to tonight"
    )
    max_new_user_share: float | None = Field(
        None, ge=0, le=1, description="largest share of tonight's users that last night had not"
    )
    max_new_item_share: float | None = Field(
        None, ge=0, le=1, description="largest share of tonight's items that last night had not"
    )
    max_vanished_user_share: float | None = Field(
        None, ge=0, le=1, description="largest share of last night's users gone tonight"
    )
    max_vanished_item_share: float | None = Field(
        None, ge=0, le=1, description="largest share of last night's items gone tonight"
    )
    max_popularity_psi: float | None = Field(
        None,
        gt=0,
        le=1_000,
        description="largest population stability index of item popularity against last night; 0.1 is usually read as a "
        "moderate, 0.25 as a major shift, and the report warns of both",
    )
    min_item_vector_share: float | None = Field(
        None, ge=0, le=1, description="smallest share of items with a pretrained vector"
    )
    max_null_share: float | None = Field(None, ge=0, le=1, description="largest share of nulls in any column of the log")
    max_duplicate_share: float | None = Field(
        None, ge=0, le=1, description="largest share of events that repeat another one: same user, item and time"
    )
    max_leaked_event_share: float | None = Field(
        0.01,
        ge=0,
        le=1,
        description="largest share of validation and test events that stand in an earlier part of the split too",
    )
    max_future_event_share: float | None = Field(
        None, ge=0, le=1, description="largest share of training events later than their own user's first test event"
    )
    max_split_violations: int | None = Field(
        0,
        ge=0,
        le=1_000 * MANY,
        description="events that break what the split promises, e.g. training events after the test began",
    )
    max_unseen_item_share: float | None = Field(
        None, ge=0, le=1, description="largest share of test events of items without a training event"
    )
    max_unseen_user_share: float | None = Field(
        None, ge=0, le=1, description="largest share of test users without a training event"
    )
    max_repeated_pair_share: float | None = Field(
        None, ge=0, le=1, description="largest share of test events of an item that the user had in training already"
    )
