"""Configuration of the interaction log: files, columns, filters and vocabulary."""

from datetime import datetime
from itertools import chain
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, WithJsonSchema, model_validator

from recsys_core.config import (
    MAX_COUNT,
    MAX_DAYS,
    OPERATIONAL,
    ColumnName,
    MaxBadShare,
    MaxExpansionRatio,
    OnBadRows,
    Paths,
    Settings,
)
from recsys_core.ingest.log.engine_settings import (
    TABLE_NAME_PATTERN,
    DuckdbSettings,
    EngineSettings,
    SparkSettings,
    is_table_name,
    split_version,
)
from recsys_core.ingest.log.split_config import FileSplit, Split, TimeSplit

_BYTES_PER_UNIT = {"K": 1_000, "M": 1_000_000, "G": 1_000_000_000, "T": 1_000_000_000_000}


def _check_memory_limit(limit: str) -> str:
    amount_text, unit_prefix = limit.rstrip("KMGTiB "), next(char for char in limit if char in _BYTES_PER_UNIT)
    if not 1_000_000 <= float(amount_text) * _BYTES_PER_UNIT[unit_prefix] <= 1e15:
        raise ValueError(f"is {limit}; set a value from 1MB to 1000TB")
    return limit


Label = Annotated[float, Field(ge=-1e30, le=1e30)]
MemoryLimit = Annotated[
    str, Field(max_length=20, pattern=r"^[0-9]{1,6}(\.[0-9]{1,6})? ?[KMGT]i?B$"), AfterValidator(_check_memory_limit)
]


class LogFilter(Settings):
    """Filters of the log, applied in the order of the fields. Each filter counts only the events that earlier filters keep."""

    until: Annotated[datetime, WithJsonSchema({"type": "string", "format": "date-time", "maxLength": 40})] | None = Field(
        None,
        description="Time of the newest event that is kept, for example `2026-03-01T00:00:00`. A time without a UTC offset is "
        "in UTC. Later events are removed, as if the log ended there. Default: all events",
    )
    window_days: float | None = Field(
        None,
        gt=0,
        le=MAX_DAYS,
        description="Length of the rolling window in days. The window ends at the newest event of the log or at `until`, "
        "whichever is earlier. Events older than the window are removed. Default: all events",
    )
    duplicates: Literal["keep", "exact", "first", "last"] = Field(
        "keep",
        description="Repeated events to remove. With `keep`, no events are removed. With `exact`, only one of several events "
        "with the same user, item and time is kept. With `first`, only the first event of a user with an item is kept; with "
        "`last`, only the last one",
    )
    bot_threshold: int | None = Field(
        None,
        ge=1,
        le=MAX_COUNT,
        description="Users with more events than this are treated as bots: their events are removed. Default: no limit",
    )
    min_user_events: int = Field(1, ge=1, le=MAX_COUNT, description="Users with fewer events than this are removed")
    min_item_events: int = Field(
        1,
        ge=1,
        le=MAX_COUNT,
        description="Items with fewer events than this are removed. The removal is repeated until all items and users have "
        "enough events (k-core)",
    )
    max_user_events: int | None = Field(
        None,
        ge=1,
        le=MAX_COUNT,
        description="Only this many of a user's newest events are kept. Default: no limit",
    )


class VocabularyConfig(Settings):
    """Rules for rebuilding the vocabularies. In a run without a rebuild every id keeps its row, and new ids are appended."""

    rebuild: Literal["when_due", "always"] = Field(
        "when_due",
        description="When the vocabularies are rebuilt. A rebuild numbers all ids by decreasing number of events. With "
        "`when_due`, they are rebuilt when `rebuild_after_runs` is reached or `max_idle_share` is exceeded. With `always`, "
        "they are rebuilt in every run",
    )
    rebuild_after_runs: int = Field(
        30, ge=1, le=10_000, description="Number of runs with the same vocabularies after which they are rebuilt"
    )
    max_idle_share: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Largest allowed share of idle ids. An idle user has no event; an idle item has neither an event nor a "
        "pretrained vector. If this share was exceeded in the previous run for users or for items, the "
        "vocabularies are rebuilt",
    )


class InteractionsConfig(Settings):
    """The interaction log, and its split."""

    paths: Paths = Field(
        min_length=1,
        description="Parquet file, folder or glob, or a list of them. A path can be local or start with `s3://` or `gs://`. "
        "For a `format` other than `parquet`, the folder of a table, or the name of a table in a catalog, such as "
        "`lake.shop.events`",
    )
    format: Literal["parquet", "delta", "iceberg", "orc"] = Field(
        "parquet",
        description="Format of the log. The formats other than `parquet` need `engine: {kind: spark}`. A table is read at the "
        "version at the end of its path, such as 12 in `lake.shop.events@v12`, or at its newest version if the path has none",
    )
    user_column: ColumnName = Field("user_id", description="Column with the user id (integer or string)")
    item_column: ColumnName = Field("item_id", description="Column with the item id (integer or string)")
    timestamp_column: ColumnName | None = Field(
        None, description="Column with the event time: a timestamp, a date, or an integer in the unit `timestamp_unit`"
    )
    timestamp_unit: Literal["s", "ms", "us", "ns"] = Field("s", description="Unit of the event times if they are integers")
    max_future_days: float = Field(
        1.0, ge=0, le=MAX_DAYS, description="An event whose time is more than this many days in the future is a bad row"
    )
    order_column: ColumnName | None = Field(
        None, description="Column by which the events of a user are sorted, for a log without event times"
    )
    label_column: ColumnName | None = Field(
        None, description="Column with a rating or label. Events with a label below `label_threshold` are removed"
    )
    label_threshold: Label | None = Field(None, description="Smallest label of an event that is kept")
    explicit_negatives: bool = Field(
        False,
        description="Keep the events with a label below `label_threshold` as known negatives of their users, for "
        "`loss.explicit_negatives` and the metric `known_negatives@K`. Known negatives do not count as events in "
        "filters, splits and vocabularies",
    )
    label_range: tuple[Label, Label] | None = Field(
        None, description="Smallest and largest valid label. An event with a label outside of this range is a bad row"
    )
    weight_column: ColumnName | None = Field(
        None, description="Column with the weights of the events in the loss. A weight is 0 or more"
    )
    context_columns: tuple[ColumnName, ...] = Field(
        (), max_length=1_000, description="Further columns of the log that are stored for each event, for context features"
    )
    split: Split = Field(
        default_factory=TimeSplit, description="How to split the log into training, validation and test events"
    )
    filter: LogFilter = Field(default_factory=LogFilter, description="Filters that remove events of the log")
    vocabulary: VocabularyConfig = Field(
        default_factory=VocabularyConfig,
        description="When to rebuild the vocabularies, which map the ids of users and items to rows of the embedding tables",
    )
    shards: int = Field(
        1,
        ge=1,
        le=64,
        description="Number of shards of the event store. Each shard has its own files with the events of every `shards`-th "
        "user. The model and the metrics do not depend on the number of shards",
    )
    on_bad_rows: OnBadRows = "fail"
    max_bad_share: MaxBadShare = 0.01
    max_expansion_ratio: MaxExpansionRatio = 1_000
    engine: Annotated[EngineSettings, OPERATIONAL] = Field(
        default_factory=DuckdbSettings,
        description="Engine that reads, filters, counts and sorts the events. Every kind gives the same result",
    )
    memory_limit: Annotated[MemoryLimit, OPERATIONAL] = Field(
        "1GB", description="Memory limit of DuckDB. Data that does not fit into this memory is written to disk"
    )
    threads: Annotated[int | None, OPERATIONAL] = Field(
        None, ge=1, le=1_024, description="Number of threads of DuckDB. Default: all cores"
    )

    @model_validator(mode="after")
    def _tables_fit_format(self) -> Self:
        if self.format == "parquet":
            return self
        if not isinstance(self.engine, SparkSettings):
            raise ValueError(
                f"format is {self.format}, but engine.kind is {self.engine.kind}, which only reads parquet; set it to spark"
            )
        split_path_lists = (
            (self.split.test_paths, self.split.validation_paths or ()) if isinstance(self.split, FileSplit) else ()
        )
        for path in chain(self.paths, *split_path_lists):
            table_name, version = split_version(path)
            if self.format == "orc" and version is not None:
                raise ValueError(f"{path} names a version, but an ORC table has none; remove @v{version}")
            if is_table_name(table_name) and TABLE_NAME_PATTERN.fullmatch(table_name) is None:
                raise ValueError(
                    f"{path!r} is not the name of a table in a catalog, such as lake.shop.events; the path of a folder has a "
                    "slash, such as ./events"
                )
            if self.format == "iceberg" and not is_table_name(table_name):
                raise ValueError(
                    f"{path!r} is a path, but an Iceberg table has a name in a catalog, such as lake.shop.events; define the "
                    "catalog in engine.conf"
                )
        return self

    @model_validator(mode="after")
    def _columns_fit_together(self) -> Self:
        if self.user_column == self.item_column:
            raise ValueError(f"user_column and item_column are both {self.user_column!r}; set them to different columns")
        for setting, column in {"user_column": self.user_column, "item_column": self.item_column}.items():
            for order_setting in ("timestamp_column", "order_column"):
                if column == getattr(self, order_setting):
                    raise ValueError(f"{setting} and {order_setting} are both {column!r}; set them to different columns")
        if self.timestamp_column is not None and self.order_column is not None:
            raise ValueError("set timestamp_column or order_column, not both")
        if (self.label_column is None) != (self.label_threshold is None):
            raise ValueError("only one of label_column and label_threshold is set; set both or neither")
        if self.explicit_negatives and self.label_column is None:
            raise ValueError(
                "explicit_negatives is true, but label_column is not set, so no event is a negative; set label_column and "
                "label_threshold, or set explicit_negatives to false"
            )
        if self.label_range is not None and self.label_column is None:
            raise ValueError("label_range is set, but label_column is not; set both or neither")
        if self.label_range is not None and self.label_range[0] >= self.label_range[1]:
            raise ValueError(f"label_range is {list(self.label_range)}: the first number has to be below the second number")
        return self

    @model_validator(mode="after")
    def _order_is_known_if_needed(self) -> Self:
        if self.split.kind == "time" and self.timestamp_column is None:
            raise ValueError("split.kind is time, which needs timestamp_column; set it, or use leave_last_out or files")
        if self.split.kind == "leave_last_out" and not self.is_ordered:
            raise ValueError("split.kind is leave_last_out, which needs timestamp_column or order_column; set one of them")
        for setting in ("until", "window_days"):
            if getattr(self.filter, setting) is not None and self.timestamp_column is None:
                raise ValueError(f"filter.{setting} needs timestamp_column; set it, or remove {setting}")
        if not self.is_ordered and (self.filter.max_user_events is not None or self.filter.duplicates in ("first", "last")):
            raise ValueError(
                "filter.max_user_events, and filter.duplicates first or last, need an order of the events; set "
                "timestamp_column or order_column"
            )
        return self

    def result_settings(self) -> dict[str, Any]:
        """Return the settings that change the result, for a fingerprint.

        A setting that was added later is left out if it has its default (parquet files, no explicit negatives, a single shard).
        The fingerprint then equals the fingerprint of a config from before the setting existed.
        """
        settings = super().result_settings()
        if self.format == "parquet":
            del settings["format"]
        if not self.explicit_negatives:
            del settings["explicit_negatives"]
        if self.shards == 1:
            del settings["shards"]
        return settings

    @property
    def source_noun(self) -> str:
        """Noun for an entry of `paths` in messages: "file" or "table"."""
        return "file" if self.format == "parquet" else "table"

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns to read, without repeats."""
        columns_or_none = (
            self.user_column,
            self.item_column,
            self.timestamp_column,
            self.order_column,
            self.label_column,
            self.weight_column,
            *self.context_columns,
        )
        return tuple(dict.fromkeys(column for column in columns_or_none if column is not None))

    @property
    def is_ordered(self) -> bool:
        """Whether the events of a user are ordered, so that the history of an event consists of earlier events."""
        return self.timestamp_column is not None or self.order_column is not None
