"""Columns of the view `raw`, and the hive keys of its files, for the SQL of each database."""

from collections.abc import Sequence
from datetime import date

from recsys_core.ingest.log.config import InteractionsConfig
from recsys_core.parquet.duckdb_session import quoted
from recsys_core.parquet.sources import Source


def column_by_alias(config: InteractionsConfig) -> dict[str, str]:
    """Return the column of the log for each column of `raw`, so that no later query has to quote the user's names."""
    columns = {"user": config.user_column, "item": config.item_column, "time": config.timestamp_column}
    columns |= {"sequence": config.order_column, "label": config.label_column, "weight": config.weight_column}
    columns |= {f"context_{index}": column for index, column in enumerate(config.context_columns)}
    return {alias: column for alias, column in columns.items() if column is not None}


def hive_columns(config: InteractionsConfig, sources: Sequence[Source]) -> set[str]:
    """Return the columns of the config that only the paths of the files have."""
    keys = {name for source in sources for name in source.partition_values if name not in source.schema.names}
    return keys & set(config.columns)


def hive_keys_sql(sources: Sequence[Source], keys: Sequence[str], *, indices: Sequence[int] | None = None) -> str:
    """Return SQL for a table with the hive keys `keys` of each file, as dates, integers or strings.

    indices: value of the column `file_index` for each file. Default: the files are numbered from 0.
    """
    rows_sql = [
        f"({index}, {', '.join(_constant_sql(source.partition_value(key)) for key in keys)})"
        for index, source in zip(indices or range(len(sources)), sources, strict=True)
    ]
    return f"SELECT * FROM (VALUES {', '.join(rows_sql)}) AS t(file_index, {', '.join(quoted(key) for key in keys)})"


def _constant_sql(value: int | date | str) -> str:
    if isinstance(value, int):
        return f"{value}::BIGINT"
    return f"DATE '{value.isoformat()}'" if isinstance(value, date) else quoted(value, quote="'")
