"""What the user says about the package."""

from typing import Literal

from pydantic import Field

from recsys_core.config import Settings


class PackageConfig(Settings):
    """The servable retriever."""

    quantization: Literal["int8", "none"] = Field(
        "int8", description="embedding tables of the query tower in INT8 (row-wise scale) or fp32"
    )
