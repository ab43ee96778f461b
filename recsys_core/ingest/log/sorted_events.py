"""The events of the log with the rows of their users and items, sorted as in the event store."""

from collections.abc import Iterator

import duckdb
import pyarrow as pa

from recsys_core.ingest.log.filters import extra_column_names
from recsys_core.ingest.log.vocabulary import Vocabulary

BATCH_ROWS = 1_000_000


def sorted_events(
    connection: duckdb.DuckDBPyConnection, *, users: Vocabulary, items: Vocabulary
) -> tuple[Iterator[pa.RecordBatch], int]:
    """Return the events of table `log`, in the columns and the order of EventWriter.write_events, and their number."""
    extra_names = extra_column_names(connection, "log")
    user_row_sql, user_join_sql = users.row_and_join_sql('log."user"')
    item_row_sql, item_join_sql = items.row_and_join_sql("log.item")
    select_list = [
        f"{user_row_sql} AS user_row",
        f"{item_row_sql} AS item_row",
        "log.split AS split",
        "log.position AS position",
        *(f"log.{column_name}" for column_name in extra_names),
    ]
    ((num_events,),) = connection.sql("SELECT count(*) FROM log").fetchall()
    batches = connection.sql(
        f"SELECT {', '.join(select_list)} FROM log{user_join_sql}{item_join_sql} "
        "ORDER BY user_row, split, position, item_row" + "".join(f", log.{column_name}" for column_name in extra_names)
    ).to_arrow_reader(BATCH_ROWS)
    return batches, num_events
