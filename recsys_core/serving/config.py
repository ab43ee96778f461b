"""Configuration of the model package."""

from typing import Literal

from pydantic import Field

from recsys_core.config import Settings


class PackageConfig(Settings):
    """The packaged model."""

    quantization: Literal["int8", "none"] = Field(
        "int8",
        description="precision of the query tower's embedding tables: int8 (with a scale and offset per row), or none (fp32)",
    )
