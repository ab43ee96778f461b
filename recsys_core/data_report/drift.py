"""Drift between two runs: new and vanished users and items, and the shift of item popularity.

Shapes: I items and U users of this run. An array with one entry per item or user of the previous run is named `previous_...`.
"""

from pathlib import Path

import duckdb
import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recsys_core.config import Frozen
from recsys_core.dataset.events import EventStore
from recsys_core.dataset.layout import rows_by_falling_count, vocabulary_file
from recsys_core.errors import shown
from recsys_core.manifests import InteractionsManifest
from recsys_core.parquet.duckdb_session import scan_sql

NUM_BUCKETS = 10
"""Number of popularity buckets. Each bucket has about equally many events."""
SMOOTHING = 0.001
"""Number that is added to the share of each bucket."""
MAX_MOVERS = 10
_BATCH_ROWS = 1_000_000

Ints = NDArray[np.int64]


class Mover(Frozen):
    """An item whose share of the training events changed, with the share in the previous run and in this run."""

    id: str
    previous_share: float
    current_share: float


def turnover_metrics(side: str, *, previous_count: Ints, count_I: Ints, previous_row_I: Ints) -> dict[str, float]:
    """Return the numbers and shares of new and vanished items (or users). An item without an event is not counted.

    The share of new items is relative to this run's items. The share of vanished items is relative to the previous run's items.

    Args:
        side: "item" or "user". For "user", the arrays have one entry per user.
        previous_count: number of events of each item in the previous run.
        count_I: number of events of each item in this run.
        previous_row_I: for each row of this run, the row of the same id in the previous run; -1 for a new id.

    >>> previous_row_I = np.array([0, 1, 2, -1])
    >>> counts = {"previous_count": np.array([3, 1, 0]), "count_I": np.array([2, 0, 4, 5])}
    >>> turnover_metrics("item", **counts, previous_row_I=previous_row_I)
    {'new_items': 2, 'vanished_items': 1, 'new_item_share': 0.6666666666666666, 'vanished_item_share': 0.5}
    """
    is_present_I = count_I > 0
    was_known_I = previous_row_I >= 0
    was_present_I = np.zeros(len(count_I), bool)
    was_present_I[was_known_I] = previous_count[previous_row_I[was_known_I]] > 0
    num_new_ids = int(np.sum(is_present_I & ~was_present_I))
    num_common_ids = int(np.sum(is_present_I & was_present_I))
    num_vanished_ids = int(np.sum(previous_count > 0)) - num_common_ids
    return {
        f"new_{side}s": num_new_ids,
        f"vanished_{side}s": num_vanished_ids,
        f"new_{side}_share": num_new_ids / max(num_new_ids + num_common_ids, 1),
        f"vanished_{side}_share": num_vanished_ids / max(num_vanished_ids + num_common_ids, 1),
    }


def match_rows(
    previous_interactions: InteractionsManifest, interactions: InteractionsManifest, *, side: str, spill_folder: Path
) -> Ints:
    """Return, for each of this run's users or items, its row in the previous run: int64, -1 for new ids.

    Rows are matched by id. If this run continues the vocabulary of the previous run, an id has the same row in both runs.

    Args:
        side: "user" or "item".
        spill_folder: folder for DuckDB's temporary files.
    """
    num_current_rows, num_previous_rows = (
        getattr(manifest, f"num_{side}s") for manifest in (interactions, previous_interactions)
    )
    # It is not enough that both runs continue a third run, because they may give the same new row to different ids.
    if interactions.continued_fingerprint == previous_interactions.fingerprint:
        continued_rows: Ints = np.arange(num_current_rows)
        continued_rows[num_previous_rows:] = -1
        return continued_rows
    matched_rows = np.full(num_current_rows, -1, np.int64)
    id_type_field = f"{side}_id_type"
    if getattr(previous_interactions, id_type_field) != getattr(interactions, id_type_field):  # 1 and "1" are different ids
        return matched_rows
    scans_sql = (
        scan_sql(manifest.path(vocabulary_file(side)), options_sql="file_row_number = true")
        for manifest in (interactions, previous_interactions)
    )
    current_ids_sql, previous_ids_sql = (f"(SELECT id, file_row_number AS row FROM {table_sql})" for table_sql in scans_sql)
    query_sql = (
        f"SELECT c.row AS current_row, p.row AS previous_row FROM {current_ids_sql} c JOIN {previous_ids_sql} p USING (id)"
    )
    with duckdb.connect(config={"temp_directory": str(spill_folder), "memory_limit": "2GB"}) as connection:
        for batch in connection.sql(query_sql).to_arrow_reader(_BATCH_ROWS):
            matched_rows[batch.column("current_row").to_numpy()] = batch.column("previous_row").to_numpy()
    return matched_rows


def popularity_buckets(count_I: Ints) -> Ints:
    """Return the bucket of each item, [I]. Each of the ten buckets has about a tenth of the events.

    Bucket 0 has the most popular items. Items with equal counts are ordered by row.

    >>> popularity_buckets(np.array([5, 50, 25, 20, 0])).tolist()
    [9, 0, 5, 7, 9]
    """
    row_by_popularity_I = rows_by_falling_count(count_I)
    sorted_count_I = count_I[row_by_popularity_I]
    num_events_above_I = np.cumsum(sorted_count_I) - sorted_count_I
    bucket_I = np.empty(len(count_I), np.int64)
    bucket_I[row_by_popularity_I] = np.minimum(
        NUM_BUCKETS * num_events_above_I // max(int(sorted_count_I.sum()), 1), NUM_BUCKETS - 1
    )
    return bucket_I


def stability_index(previous_count: Ints, count: Ints, *, smoothing: float = SMOOTHING) -> float:
    """Return the population stability index between two counts over the same buckets: the sum of (a - b) * ln(a / b).

    a and b are the shares of a bucket in the two counts. `smoothing` is added to each share, and the shares are rescaled
    to a sum of 1, so that an empty bucket has a large but finite effect. The index is 0 for equal shares. By the rule of thumb
    0.1 is a moderate and 0.25 a major shift (Siddiqi, Credit Risk Scorecards, 2006; Yurdakul, Statistical Properties of
    Population Stability Index, 2018).

    Below, the shares (0.5, 0.5) become (0.75, 0.25): 0.25 * ln(1.5) + 0.25 * ln(2) = 0.2747.

    >>> round(stability_index(np.array([5, 5]), np.array([30, 10]), smoothing=0), 4)
    0.2747
    >>> stability_index(np.array([5, 5]), np.array([10, 10]))
    0.0
    """
    previous_share, share = (
        (bucket_count / bucket_count.sum() + smoothing) / (1 + smoothing * len(bucket_count))
        for bucket_count in (np.asarray(previous_count), np.asarray(count))
    )
    return float(np.sum((share - previous_share) * np.log(share / previous_share)))


def popularity_psi(previous_count: Ints, count_I: Ints, *, previous_row_I: Ints) -> float:
    """Return the population stability index of the training events between the previous run and this run.

    The buckets are the previous run's `popularity_buckets` and one bucket for new items.

    >>> popularity_psi(np.array([4, 4]), np.array([8, 8]), previous_row_I=np.array([1, 0]))
    0.0
    """
    previous_bucket = popularity_buckets(previous_count)
    was_known_I = previous_row_I >= 0
    bucket_count = np.bincount(previous_bucket[previous_row_I[was_known_I]], count_I[was_known_I], minlength=NUM_BUCKETS + 1)
    bucket_count[NUM_BUCKETS] = count_I[~was_known_I].sum()
    return stability_index(np.bincount(previous_bucket, previous_count, minlength=NUM_BUCKETS + 1), bucket_count)


def find_movers(
    previous_interactions: InteractionsManifest,
    interactions: InteractionsManifest,
    *,
    previous_count: Ints,
    count_I: Ints,
    previous_row_I: Ints,
) -> tuple[Mover, ...]:
    """Return the items whose share of the training events changed most, largest change first."""
    was_known_I = previous_row_I >= 0
    previous_share, share_I = previous_count / previous_count.sum(), count_I / count_I.sum()
    previous_share_I = np.zeros(len(count_I))
    previous_share_I[was_known_I] = previous_share[previous_row_I[was_known_I]]
    moved_rows = np.argsort(-np.abs(share_I - previous_share_I), kind="stable")[:MAX_MOVERS]

    # An item that is no longer in the vocabulary has no row in this run.
    is_removed = np.ones(len(previous_count), bool)
    is_removed[previous_row_I[was_known_I]] = False
    removed_rows = np.flatnonzero(is_removed)
    removed_rows = removed_rows[rows_by_falling_count(previous_count[removed_rows])[:MAX_MOVERS]]

    share_pairs = np.concatenate(
        [
            np.stack([previous_share_I[moved_rows], share_I[moved_rows]], axis=1),
            np.stack([previous_share[removed_rows], np.zeros(len(removed_rows))], axis=1),
        ]
    )
    item_ids = read_item_ids(interactions, moved_rows) + read_item_ids(previous_interactions, removed_rows)
    movers = [
        Mover(id=item_id, previous_share=previous_item_share, current_share=current_item_share)
        for item_id, (previous_item_share, current_item_share) in zip(item_ids, share_pairs.tolist(), strict=True)
        if previous_item_share != current_item_share
    ]
    movers.sort(key=lambda mover: -abs(mover.current_share - mover.previous_share))
    return tuple(movers[:MAX_MOVERS])


def compare_runs(
    previous_interactions: InteractionsManifest, interactions: InteractionsManifest, *, num_events_I: Ints, spill_folder: Path
) -> tuple[dict[str, float], tuple[Mover, ...]]:
    """Return the drift metrics and the items with the largest change of popularity.

    num_events_I: number of events of each item in this run, in all splits.
    """
    previous_store, store = EventStore.open(previous_interactions), EventStore.open(interactions)
    previous_train_count, train_count_I = previous_store.train_count_I, store.train_count_I
    previous_row_I = match_rows(previous_interactions, interactions, side="item", spill_folder=spill_folder)
    previous_row_U = match_rows(previous_interactions, interactions, side="user", spill_folder=spill_folder)
    metrics = {
        "event_drop_share": 1 - interactions.num_train_events / previous_interactions.num_train_events,
        **turnover_metrics(
            "item", previous_count=previous_store.event_count_I(), count_I=num_events_I, previous_row_I=previous_row_I
        ),
        **turnover_metrics(
            "user", previous_count=previous_store.event_count_U, count_I=store.event_count_U, previous_row_I=previous_row_U
        ),
        "popularity_psi": popularity_psi(previous_train_count, train_count_I, previous_row_I=previous_row_I),
    }
    movers = find_movers(
        previous_interactions,
        interactions,
        previous_count=previous_train_count,
        count_I=train_count_I,
        previous_row_I=previous_row_I,
    )
    return {name: float(value) for name, value in metrics.items()}, movers


def read_item_ids(interactions: InteractionsManifest, rows: Ints) -> list[str]:
    """Return the item ids in a few rows of the vocabulary, quoted and escaped for display."""
    id_by_row: dict[int, str] = {}
    first_batch_row = 0
    with pq.ParquetFile(interactions.path(vocabulary_file("item"))) as file:
        for batch in file.iter_batches(65_536, columns=["id"]):
            for row in rows[(rows >= first_batch_row) & (rows < first_batch_row + batch.num_rows)].tolist():
                id_by_row[row] = shown(batch.column("id")[row - first_batch_row].as_py())
            first_batch_row += batch.num_rows
    return [id_by_row[row] for row in rows.tolist()]
