"""What the user says about pretrained vectors."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from recsys_core.config import MANY, OPERATIONAL, Checksums, Column, Paths, Settings


class IdMapConfig(Settings):
    """Which of our ids another domain's id stands for."""

    paths: Paths = Field(min_length=1, description="parquet file or glob, or a list of them")
    from_column: Column = Field(description="column with the ids as they are in the vectors' id_column")
    to_column: Column = Field(description="column with our ids")


class EmbeddingsConfig(Settings):
    """Pretrained vectors of one table, in parquet."""

    paths: Paths = Field(min_length=1, description="parquet file or glob, or a list of them")
    table: str = Field(
        "item",
        max_length=200,
        pattern=r"^[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*$",
        description="embedding table they start: item, user, or a feature such as item.brand",
    )
    id_column: Column = Field("item_id", description="column with the id")
    vector_column: Column | None = Field(None, description="list or fixed-size-list column that holds the whole vector")
    dimension_prefix: Column | None = Field(
        None, description="with one column per dimension: their common prefix, e.g. dim_ for dim_0, dim_1"
    )
    id_map: IdMapConfig | None = Field(
        None,
        description="for vectors of another domain: {paths, from_column, to_column}; vectors whose id it lacks are left out",
    )
    pca_dim: int | None = Field(
        None, ge=1, le=16_384, description="project to this many principal components; empty: as they are"
    )
    normalise: bool = Field(False, description="scale each vector to length 1, after the projection")
    checksums: Checksums = "pages"
    on_bad_rows: Literal["fail", "drop"] = Field("fail", description="what to do with a row that holds no usable vector or id")
    max_bad_share: float = Field(0.01, ge=0, le=1, description="with on_bad_rows drop: fail when more than this share is bad")
    max_expansion_ratio: Annotated[int, OPERATIONAL] = Field(
        1_000,
        ge=1,
        le=MANY,
        description="a file that unpacks to more than 1 GiB and this many times its size is refused unread",
    )
    batch_rows: Annotated[int, OPERATIONAL] = Field(
        65_536, ge=1, le=16_777_216, description="rows read at a time at most; fewer where vectors are long"
    )
    threads: Annotated[int | None, OPERATIONAL] = Field(
        None, ge=1, le=1_024, description="files and row groups read at once; all cores when empty"
    )

    @model_validator(mode="after")
    def _one_layout(self) -> Self:
        if (self.vector_column is None) == (self.dimension_prefix is None):
            raise ValueError("set exactly one of vector_column (list column) and dimension_prefix (one column per dimension)")
        return self


def _as_tuple(value: Any) -> Any:
    if value is None:
        return ()
    return (value,) if isinstance(value, dict | EmbeddingsConfig) else value


EmbeddingsConfigs = Annotated[tuple[EmbeddingsConfig, ...], BeforeValidator(_as_tuple)]
"""One mapping or a list of them; of two entries for one table the earlier wins where both have an id."""
