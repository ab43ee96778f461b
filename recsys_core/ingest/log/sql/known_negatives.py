"""Known negatives: the pairs of a user and an item that have a label below the threshold and no event.

The view `coded_events` has the rows of all log parts (see LogPart), with codes in place of ids. Its column `is_negative` marks
the rows below the threshold. `log` has the events.
"""

from recsys_core.ingest.log.config import InteractionsConfig
from recsys_core.ingest.log.split_config import LeaveLastOut
from recsys_core.ingest.log.sql.session import SqlSession, fetch_count, first_rows_sql


def create_known_negatives(session: SqlSession, config: InteractionsConfig, *, split_sql: str, is_in_window_sql: str) -> None:
    """Create table `known_negatives` (user, item, position, split): each pair once, at its first row.

    A pair is left out if the user has an event with the item in the same or an earlier split. An event of a later split does
    not remove the pair, because the training would otherwise depend on held-out events.

    Args:
        split_sql: SQL for the code of an event's split.
        is_in_window_sql: SQL that is true for rows in the time window of the filter.
    """
    if isinstance(config.split, LeaveLastOut):
        # A negative at the time of a held-out event may be from the same session, so it belongs to the split of this event.
        split_sql = "CASE WHEN position >= test_position THEN 2 WHEN position >= validation_position THEN 1 ELSE 0 END"
    held_out_positions_sql = (
        'SELECT "user", min(position) FILTER (split = 1) AS validation_position, '
        'min(position) FILTER (split = 2) AS test_position FROM log GROUP BY "user"'
    )
    negative_rows_sql = (
        f'SELECT "user", item, position, ({split_sql})::TINYINT AS split FROM coded_events '
        f'JOIN ({held_out_positions_sql}) USING ("user") '
        f"WHERE is_negative AND {is_in_window_sql}"
    )
    first_negative_rows_sql = first_rows_sql(
        f"({negative_rows_sql})", window_sql='PARTITION BY "user", item ORDER BY split, position'
    )
    event_pairs_sql = 'SELECT "user", item, min(split) AS event_split FROM log GROUP BY "user", item'
    session.create_table(
        "known_negatives",
        f"SELECT * EXCLUDE (event_split) FROM ({first_negative_rows_sql}) "
        f'LEFT JOIN ({event_pairs_sql}) USING ("user", item) WHERE event_split IS NULL OR event_split > split',
    )


def count_and_select_negatives(session: SqlSession, *, is_ordered: bool) -> tuple[int, str]:
    """Return the number of known negatives whose items are in the vocabulary, and SQL for EventWriter.write_negatives.

    A user's negatives with the same position are in random order, so that no item is preferred. The order comes from
    a hash of the ids. Codes and rows of the vocabulary are not used, because they differ between an incremental and a complete
    ingest. The ids of the user and the item are hashed as one string. A hash of two values would order the items in almost the
    same way for each user.

    Args:
        is_ordered: whether the events have an order; if not, num_earlier_events is 0.
    """
    session.create_table(
        "known_negatives", "SELECT * FROM known_negatives SEMI JOIN items ON known_negatives.item = items.code"
    )
    negatives_sql = "SELECT *, 0 AS num_earlier_events FROM known_negatives"
    if is_ordered:
        events_and_negatives_sql = (
            'SELECT "user", item, position, split, false AS is_negative FROM log SEMI JOIN known_negatives USING ("user") '
            "UNION ALL SELECT *, true FROM known_negatives"
        )
        # Negatives come before the events with the same position.
        window_sql = 'PARTITION BY "user", split ORDER BY position, is_negative DESC ROWS UNBOUNDED PRECEDING'
        negatives_sql = (
            f"SELECT * FROM (SELECT *, count(CASE WHEN NOT is_negative THEN 1 END) OVER ({window_sql}) AS num_earlier_events "
            f"FROM ({events_and_negatives_sql})) WHERE is_negative"
        )
    negatives_sql = (
        'SELECT users."row" AS user_row, items."row" AS item_row, split, position, num_earlier_events, '
        "ordering_hash(users.id::VARCHAR || '/' || items.id::VARCHAR) AS pair_hash "
        f'FROM ({negatives_sql}) AS negatives JOIN users ON negatives."user" = users.code '
        "JOIN items ON negatives.item = items.code"
    )
    sorted_sql = (
        f"SELECT user_row, item_row, split, num_earlier_events FROM ({negatives_sql}) AS negatives "
        "ORDER BY user_row, split, position, pair_hash"
    )
    return fetch_count(session, "SELECT count(*) FROM known_negatives"), sorted_sql
