"""Settings of item vectors that are computed from the log."""

from importlib.util import find_spec
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from recsys_core.config import MAX_COUNT, OPERATIONAL, Settings
from recsys_core.errors import InputError

Exponent = Annotated[float, Field(ge=0, le=2)]


class LogVectorsSettings(Settings):
    """Settings of item vectors that are computed from the training events, for the table `item`."""

    table: ClassVar[str] = "item"
    source: Literal["log"] = Field("log", description="the training events of the log")
    dim: int = Field(64, ge=4, le=2_048, multiple_of=4, description="Width of the vectors")
    max_events: int = Field(
        20_000_000,
        ge=1_000,
        le=MAX_COUNT,
        description="Number of training events that are used. With more events, the users are sampled with a fixed seed, and "
        "an item without an event in the sample gets no vector",
    )
    memory_gb: Annotated[float, OPERATIONAL] = Field(
        4.0, gt=0, le=1e6, description="Memory limit in GB. A run stops if the matrices need more"
    )

    def require_libraries(self) -> None:
        """Raise InputError if a library of the method is not installed."""


class SpectralVectorsConfig(LogVectorsSettings):
    """Item vectors from a truncated singular value decomposition of the normalised user-item matrix."""

    method: Literal["spectral"] = Field(
        "spectral",
        description="the first singular vectors of the user-item matrix. Each entry of the matrix is divided by a power of the "
        "user's number of events and by a power of the item's number of events",
    )
    user_exponent: Exponent = Field(
        0.5,
        description="exponent e: each entry of a user in the matrix is divided by (number of the user's events)^e. With `0`, "
        "users with many events determine the first dimensions",
    )
    item_exponent: Exponent = Field(
        0.5,
        description="exponent e: each entry of an item in the matrix is divided by (number of the item's events)^e. With `0`, "
        "popular items determine the first dimensions; with `0.5`, rare items have as long vectors as popular ones",
    )
    singular_power: float = Field(
        0.5,
        ge=0,
        le=8,
        description="exponent e: each dimension of the vectors is multiplied by (singular value of the dimension)^e. With `0`, "
        "all dimensions have the same weight; the higher the exponent, the more weight the first dimensions have",
    )


class EaseVectorsConfig(LogVectorsSettings):
    """Item vectors from a truncated decomposition of the weights of EASE."""

    method: Literal["ease"] = Field(
        "ease",
        description="the first eigenvectors of the item-item weights of EASE, a linear model that needs a matrix of all pairs "
        "of items",
    )
    l2: float = Field(
        500.0,
        gt=0,
        le=1e9,
        description="L2 regularisation of EASE. The larger the value, the less influence rare pairs of items have",
    )


class IalsVectorsConfig(LogVectorsSettings):
    """Item vectors of a matrix factorisation by alternating least squares."""

    method: Literal["ials"] = Field(
        "ials",
        description="the item factors of implicit alternating least squares, computed by the library implicit, which the extra "
        "`ials` installs",
    )
    l2: float = Field(1.0, gt=0, le=1e9, description="L2 regularisation of the factors")
    alpha: float = Field(
        10.0,
        gt=0,
        le=1e6,
        description="confidence of a user-item pair with events, relative to the confidence of a pair without events",
    )
    iterations: int = Field(15, ge=1, le=1_000, description="number of iterations, each over all users and all items")

    def require_libraries(self) -> None:
        """Raise InputError if the library implicit is not installed."""
        if find_spec("implicit") is None:
            raise InputError(
                "embeddings.method is ials, which needs the library implicit; install nightjar with the extra ials, e.g. "
                'pip install ".[ials]", or set method to spectral'
            )


LogVectorsConfig = Annotated[SpectralVectorsConfig | EaseVectorsConfig | IalsVectorsConfig, Field(discriminator="method")]
