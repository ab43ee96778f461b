"""Tonight's users and items beside last night's: who is new, who is gone, and how far popularity moved.

Shapes: I items of tonight, L of last night; B buckets.
"""

from dataclasses import dataclass
from pathlib import Path

import duckdb
import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recsys_core.config import Frozen
from recsys_core.errors import shown
from recsys_core.manifests import InteractionsManifest
from recsys_core.parquet.sql import scan

BUCKETS = 10
SMOOTHING = 0.001
MOVERS = 10
_BATCH_ROWS = 1_000_000

Ints = NDArray[np.int64]


class Mover(Frozen):
    """An item and its share of the training events, last night and tonight."""

    id: str
    before: float
    after: float


@dataclass(frozen=True)
class Change:
    """How one side, users or items, changed. Only those with an event count."""

    new: int
    vanished: int
    new_share: float
    """Of tonight's."""
    vanished_share: float
    """Of last night's."""

    @classmethod
    def between(cls, before_L: Ints, after_I: Ints, *, row_before_I: Ints) -> "Change":
        """before_L and after_I: events by row; row_before_I: last night's row of each of tonight's, -1 where it had none.

        >>> Change.between(np.array([3, 1, 0]), np.array([2, 0, 4, 5]), row_before_I=np.array([0, 1, 2, -1]))
        Change(new=2, vanished=1, new_share=0.6666666666666666, vanished_share=0.5)
        """
        there = after_I > 0
        known = row_before_I >= 0
        was_there = np.zeros(len(after_I), bool)
        was_there[known] = before_L[row_before_I[known]] > 0
        new, stayed = int(np.sum(there & ~was_there)), int(np.sum(there & was_there))
        vanished = int(np.sum(before_L > 0)) - stayed
        return cls(new, vanished, _share(new, new + stayed), _share(vanished, vanished + stayed))


def match_rows(before: InteractionsManifest, after: InteractionsManifest, *, side: str, spill: Path) -> Ints:
    """Last night's row of each of tonight's `side` ("users" or "items"), -1 where it had none; by id unless rows agree."""
    rows, last_rows = (_rows(manifest, side) for manifest in (after, before))
    if after.continues == before.fingerprint:  # of two nights that continued one and the same, new rows may differ
        same: Ints = np.arange(rows)
        same[last_rows:] = -1
        return same
    matched = np.full(rows, -1, np.int64)
    kind = f"{side.removesuffix('s')}_id_type"
    if getattr(before, kind) != getattr(after, kind):  # 1 and "1" are different ids
        return matched
    later, earlier = (
        f"(SELECT id, file_row_number AS row FROM {scan(manifest.path(f'{side}.parquet'), options='file_row_number = true')})"
        for manifest in (after, before)
    )
    query = f"SELECT a.row AS after, b.row AS before FROM {later} a JOIN {earlier} b USING (id)"
    with duckdb.connect(config={"temp_directory": str(spill), "memory_limit": "2GB"}) as connection:
        for batch in connection.sql(query).to_arrow_reader(_BATCH_ROWS):
            matched[batch.column("after").to_numpy()] = batch.column("before").to_numpy()
    return matched


def popularity_buckets(events_L: Ints) -> Ints:
    """Items in ten buckets of about a tenth of the events each: 0 holds the most frequent items, ties by row.

    >>> popularity_buckets(np.array([5, 50, 25, 20, 0])).tolist()
    [9, 0, 5, 7, 9]
    """
    order = np.argsort(-events_L, kind="stable")
    sorted_L = events_L[order]
    above_L = np.cumsum(sorted_L) - sorted_L
    bucket_L = np.empty(len(events_L), np.int64)
    bucket_L[order] = np.minimum(BUCKETS * above_L // max(int(sorted_L.sum()), 1), BUCKETS - 1)
    return bucket_L


def stability_index(before_B: Ints, after_B: Ints, *, smoothing: float = SMOOTHING) -> float:
    """Population stability index between two counts over the same buckets: sum of (a - b) * ln(a / b) over their shares.

    `smoothing` is added to each share before they are scaled to one again, so that an empty bucket counts, but not without
    end. 0 where the shares agree; the rule of thumb calls 0.1 a moderate and 0.25 a major shift (Siddiqi, Credit Risk
    Scorecards, 2006; Yurdakul, Statistical Properties of Population Stability Index, 2018).

    Half and half becomes three quarters and a quarter: 0.25 * ln(1.5) + 0.25 * ln(2) = 0.2747.

    >>> round(stability_index(np.array([5, 5]), np.array([30, 10]), smoothing=0), 4)
    0.2747
    >>> stability_index(np.array([5, 5]), np.array([10, 10]))
    0.0
    """
    before, after = (
        (count_B / count_B.sum() + smoothing) / (1 + smoothing * len(count_B))
        for count_B in (np.asarray(before_B), np.asarray(after_B))
    )
    return float(np.sum((after - before) * np.log(after / before)))


def popularity_shift(before_L: Ints, after_I: Ints, *, row_before_I: Ints) -> float:
    """Stability index of training events over last night's popularity buckets, and one more for items that it had not.

    >>> popularity_shift(np.array([4, 4]), np.array([8, 8]), row_before_I=np.array([1, 0]))
    0.0
    """
    bucket_L = popularity_buckets(before_L)
    known = row_before_I >= 0
    after_B = np.bincount(bucket_L[row_before_I[known]], after_I[known], minlength=BUCKETS + 1)
    after_B[BUCKETS] = after_I[~known].sum()
    return stability_index(np.bincount(bucket_L, before_L, minlength=BUCKETS + 1), after_B)


def find_movers(
    before: InteractionsManifest, after: InteractionsManifest, *, before_L: Ints, after_I: Ints, row_before_I: Ints, count: int
) -> tuple[Mover, ...]:
    """The items whose share of the training events changed most."""
    known = row_before_I >= 0
    lost_L = np.ones(len(before_L), bool)
    lost_L[row_before_I[known]] = False
    share_before_I, share_after_I = np.zeros(len(after_I)), after_I / after_I.sum()
    share_before_I[known] = (before_L / before_L.sum())[row_before_I[known]]
    gone = np.flatnonzero(lost_L)
    gone = gone[np.argsort(-before_L[gone], kind="stable")[:count]]
    moved = np.argsort(-np.abs(share_after_I - share_before_I), kind="stable")[:count]
    rows = [
        *zip(read_ids(after, moved), share_before_I[moved].tolist(), share_after_I[moved].tolist(), strict=True),
        *zip(read_ids(before, gone), (before_L[gone] / before_L.sum()).tolist(), [0.0] * len(gone), strict=True),
    ]
    rows = sorted((row for row in rows if row[1] != row[2]), key=lambda row: -abs(row[2] - row[1]))
    return tuple(Mover(id=item, before=share, after=now) for item, share, now in rows[:count])


def compare_nights(
    before: InteractionsManifest, tonight: InteractionsManifest, *, events_I: Ints, spill: Path
) -> tuple[dict[str, float], tuple[Mover, ...]]:
    """Metrics of the change, and the items that moved most. events_I: tonight's events of each item, in all parts."""
    last_count_L, count_I = (np.load(night.path("item_count.npy"), mmap_mode="r") for night in (before, tonight))
    row_before_I = match_rows(before, tonight, side="items", spill=spill)
    row_before_U = match_rows(before, tonight, side="users", spill=spill)
    items = Change.between(_events_of_items(before), events_I, row_before_I=row_before_I)
    users = Change.between(*(_events_of_users(night) for night in (before, tonight)), row_before_I=row_before_U)
    changes = {
        "event_drop_share": 1 - tonight.train_events / before.train_events,
        "new_users": users.new,
        "new_items": items.new,
        "vanished_users": users.vanished,
        "vanished_items": items.vanished,
        "new_user_share": users.new_share,
        "new_item_share": items.new_share,
        "vanished_user_share": users.vanished_share,
        "vanished_item_share": items.vanished_share,
        "popularity_psi": popularity_shift(last_count_L, count_I, row_before_I=row_before_I),
    }
    moved = find_movers(before, tonight, before_L=last_count_L, after_I=count_I, row_before_I=row_before_I, count=MOVERS)
    return {name: float(value) for name, value in changes.items()}, moved


def read_ids(manifest: InteractionsManifest, rows: Ints) -> list[str]:
    """The item ids of a few rows, as they are shown: quoted, control and direction marks escaped, long ones cut."""
    found: dict[int, str] = {}
    start = 0
    with pq.ParquetFile(manifest.path("items.parquet")) as file:
        for batch in file.iter_batches(65_536, columns=["id"]):
            for row in rows[(rows >= start) & (rows < start + batch.num_rows)].tolist():
                found[row] = shown(batch.column("id")[row - start].as_py())
            start += batch.num_rows
    return [found[row] for row in rows.tolist()]


def _rows(manifest: InteractionsManifest, side: str) -> int:
    return manifest.users if side == "users" else manifest.items


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _events_of_users(interactions: InteractionsManifest) -> Ints:
    events_U: Ints = np.diff(np.load(interactions.path("user_offset.npy"), mmap_mode="r"))
    return events_U


def _events_of_items(interactions: InteractionsManifest, *, chunk: int = 16_000_000) -> Ints:
    event_item = np.load(interactions.path("event_item.npy"), mmap_mode="r")
    total = np.zeros(interactions.items, np.int64)
    for start in range(0, len(event_item), chunk):
        total += np.bincount(event_item[start : start + chunk], minlength=interactions.items)
    return total
