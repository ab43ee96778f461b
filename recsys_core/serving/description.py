"""package.json, the manifest of a model package, and the files that a package has."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal, Self

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field, TypeAdapter, model_validator

from recsys_core.config import Frozen
from recsys_core.dataset.layout import shard_files
from recsys_core.errors import StageError
from recsys_core.manifests import (
    EvaluationManifest,
    FeaturesManifest,
    FileRecord,
    IdType,
    IngestedFeature,
    InteractionsManifest,
    PackageManifest,
    record_file,
)
from recsys_core.models.config import ExportFormat, Quantization
from recsys_core.models.spec import ModelSpec
from recsys_core.retrieval.config import MAX_SHARDS
from recsys_core.retrieval.kinds import AnyIndexKind
from recsys_core.serving.answers import Fallback

DESCRIPTION_NAME = "package.json"
INDEX_NAME = "index.faiss"
ITEMS_NAME = "items.parquet"
USERS_NAME, USERS_CHECKSUMS_NAME = "users.arrow", "users.sha256"
SEGMENTS_NAME = "popularity_by.parquet"
GOLDEN_NAME = "golden.json"
"""File with requests and their expected answers, which are compared with the answers of the loaded package."""
CANDIDATE_NAME = "candidate.safetensors"
"""File with the candidate tower, which embeds items that are added after the training; see recsys_core.refresh."""
SOURCES_NAME = "item_sources.npy"
"""File with one number per item: FROM_VECTORS if the vector files have the item, plus FROM_FEATURES if the item table does."""
FROM_VECTORS, FROM_FEATURES = 1, 2
FORMAT_VERSION: Final = 8
QUERY_COLUMNS = ("user_id", "history")
"""Columns that a request for recommendations can have in addition to feature columns."""
ITEM_COLUMN = "item_id"
"""Column of a request for similar items."""
_INDEX_KIND_ADAPTER: TypeAdapter[AnyIndexKind] = TypeAdapter(AnyIndexKind)


class QueryFeature(Frozen):
    """A feature of the query tower, with the settings that map its values to rows of its embedding table.

    Attributes:
        column, weight_column: columns with the values and the weights in the log or in the feature table.
        value_type: type of the values; None for numbers.
        hash_rows: number of rows onto which a hash maps the values; None for a vocabulary.
        max_values: largest number of values of a list that the model reads; None for all.
        boundaries: limits of the buckets of a number.
        mean, std: standardisation of a number that has no buckets.
    """

    kind: Literal["categorical", "list", "weighted_list", "numeric"]
    column: str
    weight_column: str | None = None
    value_type: IdType | None = None
    hash_rows: int | None = None
    max_values: int | None = None
    boundaries: tuple[float, ...] | None = None
    mean: float | None = None
    std: float | None = None

    @classmethod
    def of(cls, key: str, manifest: FeaturesManifest) -> Self:
        """Return the feature `key` of a features stage. Its `value_type` is the type of its vocabulary, if there is one."""
        ingested_feature = manifest.features[key]
        settings = ingested_feature.model_dump(include=cls.model_fields.keys() - {"column"})
        feature = cls(column=ingested_feature.column or key.partition(".")[2], **settings)
        if not feature.has_vocabulary:
            return feature
        value_type = pq.read_schema(manifest.path(vocabulary_name(key))).field("value").type
        return feature.model_copy(update={"value_type": "string" if pa.types.is_string(value_type) else "int64"})

    @property
    def has_vocabulary(self) -> bool:
        """Whether the package has a file with the vocabulary of the feature."""
        return self.kind != "numeric" and self.hash_rows is None


class DataWindow(Frozen):
    """Times and sizes of the log with which the model was trained and evaluated."""

    first_time: str | None
    last_time: str | None
    num_events: int
    num_users: int
    num_items: int

    @classmethod
    def of(cls, interactions: InteractionsManifest) -> Self:
        """Return the window of an ingested log."""
        return cls(
            first_time=interactions.first_time,
            last_time=interactions.last_time,
            num_events=interactions.num_events,
            num_users=interactions.num_users,
            num_items=interactions.num_items,
        )


class Metric(Frozen):
    """A metric of the model on the test split.

    half_width: half the width of the confidence interval; None if the metric is no mean over users.
    """

    value: float
    half_width: float | None


class PackageDescription(Frozen):
    """package.json: properties of the package, and the size and checksum of every other file."""

    format_version: Literal[8] = FORMAT_VERSION
    model: ModelSpec
    space_id: str = Field(description="hash of both towers: vectors with different ids must not be compared")
    similarity: Literal["cosine", "dot"]
    quantization: Quantization
    index_kind: str
    index_parameters: dict[str, int]
    index_shards: int = Field(1, ge=1, le=MAX_SHARDS, description="number of files of the index, each with a part of the items")
    dim: int = Field(description="width of query and item vectors")
    max_k: int = Field(description="largest number of recommended items: a request for more gets all items")
    users: Literal["stored", "none"] = Field(description="whether the package has the histories and features of the users")
    fallbacks: tuple[Fallback, ...] = Field(
        description="sources of recommendations for unknown users; the first source that the request has is used"
    )
    features: dict[str, QueryFeature] = Field(description="features of users and context, by key")
    item_features: dict[str, IngestedFeature] = Field(
        description="encodings of the features that the candidate tower reads, by key"
    )
    filter_columns: tuple[str, ...]
    has_titles: bool
    item_vectors: Literal["fp32", "fp16", "none"] = Field("fp32", description="precision of the vectors in items.parquet")
    popularity_by: str | None = Field(None, description="feature whose values have their own most popular items")
    exports: tuple[ExportFormat, ...] = Field((), description="formats of the query tower for other runtimes")
    data: DataWindow
    metrics: dict[str, Metric] = Field(description="metrics on the test split over the whole catalogue, by name")
    files: dict[str, FileRecord]

    @property
    def index(self) -> AnyIndexKind:
        """Kind of the index, with the settings with which it was built."""
        return _INDEX_KIND_ADAPTER.validate_python({"kind": self.index_kind} | self.index_parameters)

    @model_validator(mode="after")
    def _index_is_valid(self) -> Self:
        _ = self.index  # raises ValidationError
        return self

    @property
    def file_names(self) -> set[str]:
        """Names of the files of the package except package.json."""
        user_file_names = (USERS_NAME, USERS_CHECKSUMS_NAME) if self.users == "stored" else ()
        segment_file_names = () if self.popularity_by is None else (SEGMENTS_NAME,)
        fixed_file_names = ("tower.safetensors", ITEMS_NAME, GOLDEN_NAME, "popularity.npy", "popularity_share.npy")
        return {
            *fixed_file_names,
            *self.index_names,
            *user_file_names,
            *segment_file_names,
            *self.vocabulary_names,
            *map(export_name, self.exports),
            CANDIDATE_NAME,
            SOURCES_NAME,
        }

    @property
    def index_names(self) -> tuple[str, ...]:
        """Names of the files of the index."""
        return shard_files(INDEX_NAME, num_shards=self.index_shards)

    @property
    def vocabulary_names(self) -> list[str]:
        """Names of the files with the vocabularies of the features."""
        query_vocabulary_names = [vocabulary_name(key) for key, feature in self.features.items() if feature.has_vocabulary]
        item_vocabulary_names = [vocabulary_name(key) for key, feature in self.item_features.items() if has_vocabulary(feature)]
        return query_vocabulary_names + item_vocabulary_names


def verify_users(folder: Path) -> None:
    """Compare the whole users.arrow with its checksum, which loading the package does not do.

    Raises:
        StageError: the file is missing or was changed, or package.json cannot be read.
    """
    try:
        package = PackageDescription.model_validate_json((folder / DESCRIPTION_NAME).read_bytes())
        if package.users == "none" or record_file(folder / USERS_NAME) == package.files[USERS_NAME]:
            return
    except (OSError, ValueError, KeyError) as error:
        raise StageError(f"{folder}: cannot be verified ({type(error).__name__}: {error}); download it again") from error
    raise StageError(f"{folder / USERS_NAME}: the file was changed after it was written; download or package the model again")


def is_unchanged(folder: Path, *, sha256: str) -> bool:
    """Return whether package.json has the checksum `sha256`, and all other files have the checksums in package.json."""
    try:
        content = (folder / DESCRIPTION_NAME).read_bytes()
        record_by_name = PackageDescription.model_validate_json(content).files
        return hashlib.sha256(content).hexdigest() == sha256 and all(
            record_file(folder / name) == record for name, record in record_by_name.items()
        )
    except (OSError, ValueError):
        return False


def export_name(export_format: ExportFormat) -> str:
    """Return the name of the file with the query tower in `export_format`."""
    return f"query.{export_format}"


def request_columns(features: Mapping[str, QueryFeature]) -> dict[str, tuple[str, str | None]]:
    """Return the request columns of each feature: the column of its values, and the column of its weights or None.

    A column keeps its name from the log or the feature table. It is called user.<column> or context.<column> if users and
    context both have a column of that name, or if the name is `user_id`, `history` or `item_id`.
    """
    sides_by_column: dict[str, set[str]] = {}
    for key, feature in features.items():
        for column in (feature.column, feature.weight_column):
            if column is not None:
                sides_by_column.setdefault(column, set()).add(key.partition(".")[0])

    def request_column(key: str, column: str) -> str:
        is_ambiguous = len(sides_by_column[column]) > 1 or column in (*QUERY_COLUMNS, ITEM_COLUMN)
        return f"{key.partition('.')[0]}.{column}" if is_ambiguous else column

    return {
        key: (
            request_column(key, feature.column),
            None if feature.weight_column is None else request_column(key, feature.weight_column),
        )
        for key, feature in features.items()
    }


def has_vocabulary(feature: IngestedFeature) -> bool:
    """Return whether a feature has a vocabulary, which numbers and hashed values do not have."""
    return feature.kind != "numeric" and feature.hash_rows is None


def description_sha256(package: PackageManifest) -> str:
    """Return the sha256 of package.json."""
    return package.files[f"package/{DESCRIPTION_NAME}"].sha256


def vocabulary_name(key: str) -> str:
    """Return the name of a feature's vocabulary file, which is the same in a features stage and in a package."""
    return f"{key}.vocabulary.parquet"


def metrics_of(evaluation: EvaluationManifest) -> dict[str, Metric]:
    """Return the metrics of the model on the test split, by name."""
    return {
        name.removeprefix("test/"): Metric(value=value, half_width=evaluation.half_widths.get(name))
        for name, value in evaluation.metrics.items()
        if name.startswith("test/")
    }
