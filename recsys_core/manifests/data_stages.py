"""Manifests of the stages that read the input (interactions, embeddings, features, data report), and the Dataset of a run."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field

from recsys_core.config import Frozen
from recsys_core.manifests.stage_folder import Manifest, require_manifest


class SourceFile(Frozen):
    """One input file, with its state at the time it was read."""

    path: str
    size_bytes: int
    num_rows: int
    modified_ns: int = Field(
        description="modification time in nanoseconds, stored because a changed file can have the same footer"
    )
    footer_sha256: str = Field(description="sha256 of the parquet footer: layout, sizes and statistics")


IdType = Literal["int64", "string"]
SPLITS = ("train", "validation", "test")
"""Names of the splits. The index of a split is its code. The events of a user are stored in the order of the codes."""


class VectorTable(Frozen):
    """Pretrained vectors of one embedding table."""

    num_rows: int
    dim: int
    id_type: IdType
    explained_variance: float | None = Field(
        None, description="share of the variance that the projection keeps; null if there is no projection"
    )
    projected_rows: tuple[tuple[int, int], ...] = Field(
        (), description="for each entry with a projection, the first row of its vectors and the row after the last one"
    )
    num_dropped_by_fault: dict[str, int] = Field(
        default_factory=dict, description="rows dropped by on_bad_rows: drop, by problem"
    )
    num_unmapped: int = Field(0, description="vectors ignored because the id map does not list their id")
    num_overridden: int = Field(
        0, description="vectors ignored because an earlier entry of `embeddings` has a vector with the same id"
    )


class EmbeddingsManifest(Manifest):
    """Pretrained vectors by embedding table.

    Files per table:
        <table>.vectors.npy: float32 [rows, dim], ordered by entry of the config list `embeddings`, then by file, then by row.
        <table>.ids.parquet: column `id`, the id of each row of the matrix.
    """

    stage: ClassVar[str] = "ingest_embeddings"
    tables: dict[str, VectorTable]
    sources: tuple[SourceFile, ...]

    def vectors_path(self, table: str) -> Path:
        """Return the path of the vectors of `table`."""
        return self.path(f"{table}.vectors.npy")

    def ids_path(self, table: str) -> Path:
        """Return the path of the ids of the vectors of `table`."""
        return self.path(f"{table}.ids.parquet")


class ColumnStatistics(Frozen):
    """Statistics of one column of the interaction log."""

    num_nulls: int = 0
    num_checked_values: int | None = Field(
        None,
        description="for context columns: number of events after the filters; num_nulls counts the nulls in these events. "
        "Null for other columns: num_nulls counts the nulls in all rows",
    )
    num_out_of_range: int = 0
    num_distinct: int | None = Field(None, description="number of distinct values, for id columns")
    num_unusual_ids: int = Field(
        0, description="for id columns: number of distinct ids with control or format characters, or more than 1,000 characters"
    )
    min_value: str | None = Field(None, description="smallest value, for columns of times, labels and weights")
    max_value: str | None = Field(None, description="largest value, for columns of times, labels and weights")


class IngestedFile(Frozen):
    """One file of the interaction log, with its statistics and the number of dropped rows."""

    source: SourceFile
    num_bad_rows_by_reason: dict[str, int] = Field(description="number of dropped rows, by `<column>: <reason>`")
    num_below_threshold: int = Field(description="number of rows whose label is below the threshold")
    spans: dict[str, tuple[float, float]] = Field(description="smallest and largest value of each numeric or time column")
    has_checksums: bool = Field(False, description="whether the pages of the file have checksums")


class LogPart(Frozen):
    """A parquet file with the events of the input files that one run has read. Later runs reuse it unchanged.

    The Spark engine writes a folder of parquet files instead.

    Columns: `source` is an index into `files`. `user` and `item` are codes: rows of user_ids.parquet and item_ids.parquet.
    `position` orders the events: the time in microseconds, or the value of the order column. `weight` and `context_<n>` are
    the weight and the context columns of the config. `is_negative` marks the rows below the label threshold; without explicit
    negatives, these rows and the column do not exist. `draw` is a random number below 1,000,000 that depends only on the
    row; see validation_share of FileSplit.
    """

    file_name: str
    settings_fingerprint: str = Field(description="fingerprint of the engine and the settings that read the files")
    files: tuple[IngestedFile, ...]


class EventShard(Frozen):
    """The events of the users in one shard."""

    num_events: int
    num_known_negatives: int = 0


class InteractionsManifest(Manifest):
    """Vocabularies of users and items, and the event log in CSR format by user.

    Row numbers of items and users are int32 in all files, or int64 if the vocabulary has more than 2^31 ids.

    Vocabulary:
        users.parquet, items.parquet: columns `id`, `train_count` and `events`. All other files refer to an id by its row in
            this file. The run that builds the vocabulary sorts the ids by descending number of events in the files, then by
            ascending id; ids with only a vector are last. Later runs keep every row and append new ids in that order.
        item_rank.npy: int64 [items], popularity rank. The item with the most training events has rank 0; ties are by row.
        item_count.npy: int64 [items], number of training events.
        user_ids.parquet, item_ids.parquet: columns `id` and `row`, with every id ever read. `row` is null for an id that is
            not in the vocabulary. The position of an id in the file is its code in the parts.

    Events, ordered by user, then split (train, validation, test), then time:
        user_offset.npy: int64 [users + 1]. The events of user u are event_item[user_offset[u]:user_offset[u + 1]].
        train_end.npy, validation_end.npy: int64 [users], index where the user's train and validation events end.
        event_item.npy: [events], item rows.
        event_time.npy: int64 [events], microseconds; only if the log has timestamps.
        event_weight.npy: float32 [events]; only with a weight column.
        context.parquet: the context columns as they were read; row k is the context of event_item[k].
        train_user.npy: [train_events], user of the k-th training event in the order of the users.

    Shards, if `interactions.shards` is S > 1: user u is in shard u % S, where it has row u // S. Each shard has its own files
    with the events and known negatives of its users, such as event_item.3.npy and context.3.parquet, which count users and
    events from 0. Outside of these files, the index of an event is its index in the concatenation of the shards. train_user.npy
    is one file, in the same order for any S. One more array exists only with several shards:
        event_offset.3.npy: int64 [users of the shard]. If entry k of train_user.npy is user u, the event of entry k
            has the index k + event_offset[u // S] in the shard.

    Known negatives, only with explicit_negatives, ordered by user, then split, then time (see KnownNegatives):
        negative_offset.npy: int64 [3 * users + 1]. The known negatives of user u in split s start at
            index negative_offset[3 * u + s].
        negative_item.npy: [known negatives], item rows.
        negative_event.npy: int64 [known negatives], index of the user's first event in this split at or after the known
            negative; if there is none, the end of the user's events in this split. Only if the events are ordered.

    Vectors:
        vector_row.npy: int64 [items], row of each item in the embeddings' item.vectors.npy, -1 if it has no vector.
        user_vector_row.npy: int64 [users], row of each user in user.vectors.npy; only if there are vectors of users.
    """

    stage: ClassVar[str] = "ingest_interactions"
    num_users: int
    num_items: int
    num_train_events: int
    num_validation_events: int
    num_test_events: int
    num_known_negatives: int = Field(0, description="pairs of a user and an item with a label below the threshold")
    is_ordered: bool = Field(
        description="whether the events of each user are in time order or in the order of the order column"
    )
    num_items_with_vector: int
    num_items_vector_only: int = Field(
        description="items that are in the catalogue only because they have a vector (cold items)"
    )
    user_id_type: IdType
    item_id_type: IdType
    id_columns: tuple[str, str] = Field(
        description="columns of user and item ids; the vocabulary is rebuilt if one of them changes"
    )
    first_time: str | None = None
    last_time: str | None = None
    test_days: float | None = Field(None, description="length of the test period in days; null unless the split is by time")
    lineage: str = Field(description="fingerprint of the run that built this vocabulary")
    continued_fingerprint: str | None = Field(
        None,
        description="fingerprint of the previous run, whose vocabulary this run extends; null if the vocabulary was rebuilt",
    )
    run_number: int = Field(description="number of runs with this vocabulary: 1 for the run that built it")
    rebuild_reason: str | None = Field(description="why the vocabulary was rebuilt; null if it was continued")
    num_idle_users: int = Field(description="number of users in the vocabulary without an event in this run")
    num_idle_items: int = Field(description="number of items in the vocabulary without an event or a vector in this run")
    num_rows_read: int = Field(description="rows of the files that this run read, without the rows of parts that it reused")
    num_files_read: int
    columns: dict[str, ColumnStatistics] = Field(description="statistics by column of the log, over all files")
    num_removed_events_by_filter: dict[str, int] = Field(
        description="events removed by each filter, such as outside_window or duplicates; bot_users counts users"
    )
    num_bad_rows_by_reason: dict[str, int] = Field(description="rows dropped by on_bad_rows: drop, by `<column>: <reason>`")
    parts: tuple[LogPart, ...]
    sources: tuple[SourceFile, ...]
    shards: tuple[EventShard, ...] = Field((), description="size of each shard; empty if the event store has a single shard")

    @property
    def num_events(self) -> int:
        """Number of events of all splits."""
        return self.num_train_events + self.num_validation_events + self.num_test_events

    @property
    def num_shards(self) -> int:
        """Number of shards of the event store."""
        return max(1, len(self.shards))


class IngestedFeature(Frozen):
    """One ingested feature."""

    kind: Literal["categorical", "list", "weighted_list", "numeric"]
    num_rows: int = Field(description="rows of the feature's embedding table, including row 0 (out of vocabulary)")
    num_values: int = Field(description="number of stored values, over all users, items or events")
    num_out_of_vocabulary: int = Field(description="values that share row 0; in lists also nulls")
    num_missing: int = Field(
        description="users, items or events without the feature: not in the table, null, NaN, or an empty list"
    )
    num_truncated: int = Field(0, description="lists longer than max_values; values after the first max_values were dropped")
    boundaries: tuple[float, ...] | None = Field(
        None, description="numeric: bucket boundaries in ascending order; values below the first boundary have row 1"
    )
    mean: float | None = Field(None, description="numeric, standardised: subtracted from each value")
    std: float | None = Field(None, description="numeric, standardised: divisor of each value; if it is 0, all weights are 0")
    definition: str = Field(description="settings of the feature; a later run with equal settings continues the vocabulary")
    is_continued: bool = Field(description="whether the run reused the vocabulary, boundaries or mean of the previous run")
    num_new_values: int = Field(0, description="values that got a row in this run")
    num_evicted_values: int = Field(0, description="values of the previous run that lost their row to a more frequent value")
    column: str | None = Field(None, description="column with the values")
    weight_column: str | None = Field(None, description="column with the weights of a weighted_list")
    value_type: IdType | None = Field(None, description="type of the values; null for numbers")
    hash_rows: int | None = Field(None, description="rows onto which a hash maps the values; null if there is no hash")
    max_values: int | None = Field(None, description="number of values of a list that are used; null for all")
    num_with_vector: int = Field(0, description="values of the vocabulary with a pretrained vector")

    @property
    def is_weighted(self) -> bool:
        """Whether each value has a weight in addition to its row."""
        return self.kind == "weighted_list" or self.mean is not None


class FeatureTableStatistics(Frozen):
    """Statistics of one input table of features."""

    num_rows: int
    num_not_in_catalogue: int = Field(description="rows whose id is not in the catalogue; ignored")
    num_without_row: int = Field(description="ids of the catalogue that have no row in the table")


class FeaturesManifest(Manifest):
    """Features <owner_kind>.<name> with owner kind user, item or context, as arrays in the order of users, items or events.

    The owners of a user or item feature are the rows of users.parquet or items.parquet. The owners of a context feature are the
    events of event_item.npy. Files per feature:

        <owner_kind>.<name>.row.npy: int32 [owners] if each owner has one value (categorical, numeric); int32 [values]
            for lists.
        <owner_kind>.<name>.offset.npy: int64 [owners + 1], bounds of each list; only for lists.
        <owner_kind>.<name>.weight.npy: float32, one weight per value; only for weighted lists and standardised numbers. For
            a standardised number, the row is 1 and the weight is the number (-10 to 10). For a missing number, both are 0.
        <owner_kind>.<name>.vocabulary.parquet: columns `value` and `count`; the position of a value is its row. Row 0 has the
            value null and is the row of all values out of vocabulary. Numeric and hashed features do not have this file.
        <owner_kind>.<name>.vector_row.npy: int64, for each row of the embedding table, the row of its pretrained vector in
            <owner_kind>.<name>.vectors.npy (embeddings stage), -1 if there is none. Only if the feature has vectors.

    item_titles.parquet has the columns `row` and `title` of the items with a title, if the config names their column.
    item_columns.parquet has the items of the item table, with the column `row` and the filter columns that the config names.
    """

    stage: ClassVar[str] = "ingest_features"
    lineage: str = Field(description="lineage of the interactions stage, which determines the order of the arrays")
    features: dict[str, IngestedFeature]
    tables: dict[str, FeatureTableStatistics] = Field(
        description="statistics of the feature table of each owner kind (user, item)"
    )
    sources: tuple[SourceFile, ...]


class LogVectorsManifest(Manifest):
    """Item vectors that are computed from the training events.

    Files:
        item.vectors.npy: float32 [vectors, dim].
        item.vector_row.npy: int64 [items], row of each item's vector, -1 if it has no vector.
    """

    stage: ClassVar[str] = "embed_log"
    num_vectors: int
    dim: int

    @property
    def vectors_path(self) -> Path:
        """Path of the vectors."""
        return self.path("item.vectors.npy")

    @property
    def vector_row_path(self) -> Path:
        """Path of the array with the row of each item's vector."""
        return self.path("item.vector_row.npy")


class DataReportManifest(Manifest):
    """report.json (recsys_core.data_report.page.DataReport) and report.html, one page for a browser."""

    stage: ClassVar[str] = "check_data"
    pages: ClassVar[Mapping[str, str]] = {"report": "check_data/report.html"}
    metrics: dict[str, float] = Field(description="metrics by name; a metric that could not be measured is left out")
    breaches: tuple[str, ...] = Field(description="violated limits, each with value, limit and setting")
    warnings: tuple[str, ...]
    compared_with: str | None = Field(description="id of the earlier run with which the data was compared")


@dataclass(frozen=True)
class Dataset:
    """The manifests of the ingest stages of one run.

    Attributes:
        interactions: vocabularies and the event store.
        embeddings: pretrained vectors by table; None if there are no pretrained vectors.
        features: features of users, items and events; None if there are no features.
        log_vectors: item vectors computed from the training events; None if the config has no vectors with `source: log`.
    """

    interactions: InteractionsManifest
    embeddings: EmbeddingsManifest | None = None
    features: FeaturesManifest | None = None
    log_vectors: LogVectorsManifest | None = None

    @classmethod
    def open(
        cls,
        *,
        interactions: Path,
        embeddings: Path | None = None,
        features: Path | None = None,
        log_vectors: Path | None = None,
    ) -> Self:
        """Open the stage folders without verifying checksums. Raise StageError if a stage is missing or incomplete."""
        return cls(
            require_manifest(interactions, InteractionsManifest, verify=False),
            None if embeddings is None else require_manifest(embeddings, EmbeddingsManifest, verify=False),
            None if features is None else require_manifest(features, FeaturesManifest, verify=False),
            None if log_vectors is None else require_manifest(log_vectors, LogVectorsManifest, verify=False),
        )

    @property
    def vector_dim_by_table(self) -> dict[str, int]:
        """Vector width of each table with vectors from files or from the log."""
        table_by_name = {} if self.embeddings is None else self.embeddings.tables
        dim_by_table = {table_name: table.dim for table_name, table in table_by_name.items()}
        return dim_by_table if self.log_vectors is None else dim_by_table | {"item": self.log_vectors.dim}

    @property
    def item_embeddings(self) -> EmbeddingsManifest | None:
        """The manifest `embeddings` if it has vectors of items; otherwise None."""
        return self.embeddings if self.embeddings is not None and "item" in self.embeddings.tables else None
