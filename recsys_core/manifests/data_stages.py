"""What the stages that read the input leave behind."""

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from recsys_core.config import Frozen
from recsys_core.manifests.stage_folder import Manifest


class SourceFile(Frozen):
    """One input file as it was when it was read."""

    path: str
    bytes: int
    rows: int
    modified_ns: int = Field(description="time of the last modification: a footer does not change with every value")
    footer_sha256: str = Field(description="sha256 of the parquet footer: layout, sizes and statistics")


IdType = Literal["int64", "string"]


class VectorTable(Frozen):
    """Pretrained vectors of one embedding table."""

    rows: int
    dim: int
    id_type: IdType
    explained_variance: float | None = Field(
        None, description="share of the variance that a projection kept, where there is one"
    )
    dropped: dict[str, int] = Field(default_factory=dict, description="rows dropped under on_bad_rows: drop, by flaw")
    unmapped: int = Field(0, description="vectors left out because the id map has no id of ours for them")
    overridden: int = Field(0, description="vectors left out because an earlier entry has one for the id")


class EmbeddingsManifest(Manifest):
    """For each table <table>.vectors.npy, float32 [rows, dim] in the order of entries, files and rows in them, and
    <table>.ids.parquet: column `id`, one per row of the matrix.
    """

    kind: ClassVar[str] = "embeddings"
    tables: dict[str, VectorTable]
    sources: tuple[SourceFile, ...]

    def vectors(self, table: str) -> Path:
        """The matrix of `table`."""
        return self.path(f"{table}.vectors.npy")

    def ids(self, table: str) -> Path:
        """The ids of the rows of the matrix."""
        return self.path(f"{table}.ids.parquet")


class ColumnFacts(Frozen):
    """What was found in one column of the log."""

    nulls: int = 0
    out_of_range: int = 0
    distinct: int | None = Field(None, description="for ids: how many there are")
    odd: int = Field(0, description="for ids: how many have control characters or more than 1,000 characters")
    first: str | None = Field(None, description="smallest value, for times, labels and weights")
    last: str | None = None


class ReadFile(Frozen):
    """One file of the log as it was read into a part: what was found in it, and what was left out."""

    source: SourceFile
    bad_rows: dict[str, int] = Field(description="by `<column>: <reason>`")
    below_threshold: int
    spans: dict[str, tuple[float, float]] = Field(
        description="smallest and largest value of the columns that are numbers or times"
    )
    checksums: bool = Field(False, description="whether its pages have any; false too for a file read before this was noted")


class LogPart(Frozen):
    """The events of the files that one night read, as codes, in one parquet file; later nights take it over as it is.

    Columns: source (index into `files`), user and item (codes: rows of user_ids.parquet and item_ids.parquet), position.
    """

    file: str
    reading: str = Field(description="fingerprint of the settings that decide what is read and how")
    files: tuple[ReadFile, ...]


class InteractionsManifest(Manifest):
    """The vocabulary and the event log as CSR by user.

    users.parquet / items.parquet: column `id` (its position is the row), `train_count` and `events`. A night that builds the
    vocabulary numbers by falling number of events in the files, ties by ascending id, ids that have only a vector last; a
    later night keeps every row and appends new ids in that order. item_rank.npy int64 [items]: 0 for the item with the most
    training events, ties by row. user_ids.parquet / item_ids.parquet: `id` and `row` (null: not in the vocabulary) of every
    id ever read; its position is the code that the parts use.
    user_offset.npy int64 [users + 1]: user u's events are event_item[user_offset[u]:user_offset[u + 1]], ordered by
    (split, time): train, then validation, then test. train_end.npy / validation_end.npy int64 [users]: absolute positions
    where the user's train / validation events end. event_item.npy int32 [events]. event_time.npy int64 [events]
    (microseconds; only where the log has timestamps). event_weight.npy float32 [events] (only with a weight column).
    context.parquet: the context columns as they came, row k for event_item[k]. train_user.npy int32 [train_events]: user of
    the k-th training event, counted in CSR order. item_count.npy int64 [items]: train_count. vector_row.npy int64 [items]:
    row in the embeddings' item.vectors.npy, -1 without a vector. user_vector_row.npy int64 [users]: the same for
    user.vectors.npy; only where there are vectors of users.
    """

    kind: ClassVar[str] = "interactions"
    users: int
    items: int
    train_events: int
    validation_events: int
    test_events: int
    ordered: bool
    items_with_vector: int
    items_vector_only: int = Field(description="in the catalogue through their vector alone (cold)")
    user_id_type: IdType
    item_id_type: IdType
    id_columns: tuple[str, str] = Field(
        description="what the ids were read from: an id of another column is another user or item"
    )
    first_time: str | None = None
    last_time: str | None = None
    lineage: str = Field(description="the night that built the vocabulary which this one continues")
    continues: str | None = Field(None, description="fingerprint of the night whose rows all mean the same ids here")
    night: int = Field(description="1 for the night that built the vocabulary, one more for each that continued it")
    rebuilt: str | None = Field(description="why the vocabulary was built anew; none where last night's was continued")
    idle_users: int = Field(description="users in the vocabulary without an event tonight")
    idle_items: int = Field(description="items in the vocabulary with neither event nor vector tonight")
    rows_read: int = Field(description="rows of the files read tonight; the others were kept from last night")
    files_read: int
    columns: dict[str, ColumnFacts] = Field(description="per column of the log, over all files")
    set_aside: dict[str, int] = Field(description="events left out on purpose, by reason, e.g. window, duplicate, bot_user")
    bad_rows: dict[str, int] = Field(description="rows dropped under on_bad_rows: drop, by `<column>: <reason>`")
    parts: tuple[LogPart, ...]
    sources: tuple[SourceFile, ...]


class FeatureFacts(Frozen):
    """One feature as it was ingested."""

    kind: Literal["categorical", "list", "weighted_list", "numeric"]
    rows: int = Field(description="rows of its embedding table, row 0 (out of vocabulary) included")
    values: int = Field(description="values stored, over all users, items or events")
    out_of_vocabulary: int = Field(description="values stored as row 0: unseen, below min_count, null or NaN")
    missing: int = Field(description="users, items or events without it: not in the table, null, NaN, or an empty list")
    truncated: int = Field(0, description="lists longer than max_values, of which the first values were kept")
    boundaries: tuple[float, ...] | None = Field(None, description="numeric: row 1 + n holds values from boundary n on")
    mean: float | None = Field(None, description="numeric, standardised: what is taken off a value")
    std: float | None = Field(None, description="numeric, standardised: what it is divided by then; 0: every weight is 0")
    definition: str = Field(description="a later night continues the vocabulary of an equal definition")
    continued: bool = Field(description="whether last night's vocabulary, boundaries or mean were kept")
    new_values: int = Field(0, description="values that got a row tonight")
    with_vector: int = Field(0, description="values of its vocabulary that have a pretrained vector")

    @property
    def weighted(self) -> bool:
        """Whether each of its values has a weight beside its row."""
        return self.kind == "weighted_list" or self.mean is not None


class FeatureTableFacts(Frozen):
    """A feature table beside the catalogue."""

    rows: int
    not_in_catalogue: int = Field(description="rows whose id the catalogue has not; ignored")
    without_row: int = Field(description="ids of the catalogue that the table has not")


class FeaturesManifest(Manifest):
    """Features in the order of the rows that they belong to: <side>.<name> with side user, item or context.

    One value each (categorical, numeric): <side>.<name>.row.npy int32 [rows]. Lists: <side>.<name>.offset.npy int64 [rows + 1]
    and .row.npy int32 [values] as CSR, .weight.npy float32 [values] where weighted. A standardised number: row 1 and the number
    as its weight (.weight.npy float32 [rows], -10 to 10); row 0 and weight 0 without one. Rows are those of users.parquet,
    items.parquet and, for the context, of event_item.npy. <side>.<name>.vocabulary.parquet (not for numeric and hashed
    features): column `value`, whose position is the row, and `count`; line 0 has value null and stands for all that is out of
    vocabulary. <side>.<name>.vector_row.npy int64 [rows of its table]: row in the embeddings' <side>.<name>.vectors.npy, -1
    without a vector and for row 0; only where there are vectors of the feature.
    """

    kind: ClassVar[str] = "features"
    lineage: str = Field(description="that of the interactions: whose rows the arrays follow")
    features: dict[str, FeatureFacts]
    tables: dict[str, FeatureTableFacts] = Field(description="per side that has a table: user, item")
    sources: tuple[SourceFile, ...]


class DataReportManifest(Manifest):
    """report.json (recsys_core.data.report.DataReport) and report.html, one page for a browser."""

    kind: ClassVar[str] = "data_report"
    metrics: dict[str, float] = Field(description="flat; only what could be measured")
    breaches: tuple[str, ...] = Field(description="limits that the data breaks, each with value, limit and setting")
    warnings: tuple[str, ...]
    compared_with: str | None = Field(description="the run whose data this was compared with")
