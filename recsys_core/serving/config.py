"""Configuration of the model package."""

from typing import Literal

from pydantic import Field

from recsys_core.config import Settings


class PackageConfig(Settings):
    """The packaged model."""

    quantization: Literal["int8", "none"] = Field(
        "int8",
        description="precision of the query tower's embedding tables in the served model: 8-bit integers with a scale and an "
        "offset per row (`int8`), or fp32 (`none`)",
    )
