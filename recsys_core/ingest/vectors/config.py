"""Configuration of the vectors of embedding tables, which are read from files or computed from the log."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from recsys_core.closed_form.config import LogVectorsConfig
from recsys_core.config import OPERATIONAL, ColumnName, MaxBadShare, MaxExpansionRatio, OnBadRows, Paths, Settings


class IdMapConfig(Settings):
    """A table that translates the ids of the vectors into the ids of the log."""

    paths: Paths = Field(min_length=1, description="Parquet file or glob, or a list of them")
    from_column: ColumnName = Field(description="Column with the ids of the vector file")
    to_column: ColumnName = Field(description="Column with the ids of the log")


class EmbeddingsConfig(Settings):
    """Pretrained vectors of one embedding table, in parquet files."""

    source: Literal["parquet"] = Field("parquet", description="pretrained vectors in parquet files")
    paths: Paths = Field(min_length=1, description="Parquet file or glob, or a list of them")
    table: str = Field(
        "item",
        max_length=200,
        pattern=r"^[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*$",
        description="Embedding table that uses the vectors: `item`, `user`, or the table of a feature such as `item.brand`",
    )
    id_column: ColumnName = Field("item_id", description="Column with the ids of the vectors")
    vector_column: ColumnName | None = Field(None, description="Column with the vectors as lists or fixed-size lists")
    dimension_prefix: ColumnName | None = Field(
        None,
        description="Common prefix of the column names if there is one column per dimension, for example `dim_` for `dim_0` "
        "and `dim_1`",
    )
    id_map: IdMapConfig | None = Field(
        None,
        description="Translation of the ids, for vectors with other ids than the log: `{paths, from_column, to_column}`. "
        "Vectors whose id is not in `from_column` are removed",
    )
    pca_dim: int | None = Field(
        None,
        ge=1,
        le=16_384,
        description="Number of principal components onto which the vectors are projected. Default: no projection",
    )
    normalise: bool = Field(False, description="Scale each vector to the norm 1 after the projection")
    on_bad_rows: OnBadRows = "fail"
    max_bad_share: MaxBadShare = 0.01
    max_expansion_ratio: MaxExpansionRatio = 1_000
    batch_rows: Annotated[int, OPERATIONAL] = Field(
        65_536,
        ge=1,
        le=16_777_216,
        description="Maximum number of rows to read at a time. Files with long vectors are read in smaller batches",
    )
    threads: Annotated[int | None, OPERATIONAL] = Field(
        None, ge=1, le=1_024, description="Number of threads that read files and row groups. Default: all cores"
    )

    @model_validator(mode="after")
    def _one_layout(self) -> Self:
        if (self.vector_column is None) == (self.dimension_prefix is None):
            raise ValueError("set exactly one of vector_column (list column) and dimension_prefix (one column per dimension)")
        return self


def _as_tuple(embeddings: Any) -> Any:
    if embeddings is None:
        return ()
    entries = (embeddings,) if isinstance(embeddings, dict | BaseModel) else embeddings
    if not isinstance(entries, list | tuple):
        return entries
    return tuple(_with_class_settings(entry) if isinstance(entry, dict) else entry for entry in entries)


def _with_class_settings(entry: dict[str, Any]) -> dict[str, Any]:
    """Return `entry` with `source` and, for vectors from the log, `method`. Defaults: `parquet` and `spectral`."""
    defaults = {"source": "log", "method": "spectral"} if entry.get("source") == "log" else {"source": "parquet"}
    return defaults | entry


AnyEmbeddings = Annotated[EmbeddingsConfig | LogVectorsConfig, Field(discriminator="source")]
EmbeddingsConfigs = Annotated[tuple[AnyEmbeddings, ...], BeforeValidator(_as_tuple)]
"""One entry or a list of entries. If two entries of a table have the same id, the first entry's vector is used."""
