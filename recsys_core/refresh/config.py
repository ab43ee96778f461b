"""Config of a refresh."""

from pydantic import Field

from recsys_core.config import Settings


class RefreshConfig(Settings):
    """Limits of `nightjar refresh`, which adds new items to the champion and removes items that are gone."""

    max_removed_share: float = Field(
        0.2,
        ge=0,
        le=1,
        description="largest share of the items that a refresh may remove. If more are missing in the vectors or in the table "
        "of items, the refresh fails, because an input is probably incomplete",
    )
    max_recall_drop: float = Field(
        0.02,
        ge=0,
        le=1,
        description="largest drop of the recall from the champion's index to the rebuilt index. The recall of an index is "
        "measured against an exact search",
    )
    min_golden_overlap: float = Field(
        0.9,
        ge=0,
        le=1,
        description="smallest share of the champion's recommendations for the golden queries that the new version also "
        "recommends. A package stores its golden queries with the answers. New items are excluded from the answers",
    )
