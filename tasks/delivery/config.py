"""Config of what a new champion delivers to other systems."""

from typing import Annotated

from pydantic import Field

from recsys_core.config import OPERATIONAL, Folder, Paths, Settings

MAX_RECOMMENDED_ITEMS = 1_000_000


class RecommendationsConfig(Settings):
    """Recommendations for many users, written to parquet files: by `nightjar recommend`, and after each promotion."""

    folder: Annotated[Folder | None, OPERATIONAL] = Field(
        None,
        description="folder for the recommendations of the champion. Each promotion replaces its files. Default: "
        "recommendations are written only by `nightjar recommend --out`",
    )
    user_paths: Annotated[Paths, OPERATIONAL] = Field(
        (),
        description="parquet files with one row per query: the column `user_id`, the column `history` (a list of item ids), or "
        "columns of features. Default: all users of the model",
    )
    k: Annotated[int, OPERATIONAL] = Field(
        100, ge=1, le=MAX_RECOMMENDED_ITEMS, description="number of items that each user gets"
    )
    exclude_seen: Annotated[bool, OPERATIONAL] = Field(True, description="whether the items of a user's history are left out")


class DeliveryConfig(Settings):
    """Systems outside of MLflow that get the champion."""

    recommendations: RecommendationsConfig = Field(
        default_factory=RecommendationsConfig,
        description="recommendations for many users, which the champion writes to parquet files",
    )
