"""The arrays that the event writer stores, for any division of the events into batches."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys_core.ingest.log.config import InteractionsConfig
from recsys_core.ingest.log.engine import Vocabulary
from recsys_core.ingest.log.event_writer import EventWriter

EVENTS = {
    "user_row": pa.array([0, 0, 0, 2, 2, 2], pa.int32()),
    "item_row": pa.array([1, 0, 1, 0, 0, 1], pa.int32()),
    "split": pa.array([0, 0, 2, 0, 1, 2], pa.int8()),
    "position": pa.array([10, 20, 30, 5, 15, 25], pa.int64()),
    "weight": pa.array([1, 2, 3, 4, 5, 6], pa.float32()),
    "context_0": pa.array(["a", "b", None, "d", "e", "f"]),
}
"""Events sorted by user, split and position. The user in row 1 has no event."""
NEGATIVES = {
    "user_row": pa.array([0, 0, 0, 0, 2, 2], pa.int32()),
    "item_row": pa.array([0, 1, 0, 1, 1, 0], pa.int32()),
    "split": pa.array([0, 1, 1, 2, 0, 2], pa.int8()),
    "num_earlier_events": pa.array([1, 0, 0, 1, 0, 0], pa.int64()),
}
"""Known negatives sorted by user and split. `num_earlier_events` is the number of earlier events of the same user and split."""


@pytest.mark.parametrize("batch_bounds", [(0, 6), (0, 1, 4, 6), (0, 2, 2, 6)])
def test_the_files_do_not_depend_on_the_sizes_of_the_batches(tmp_path: Path, batch_bounds: tuple[int, ...]) -> None:
    config = InteractionsConfig(paths=("log",), timestamp_column="t", weight_column="w", context_columns=("shop",))
    users, items = (
        Vocabulary(side, pa.chunked_array([ids]), np.full(len(ids), -1))
        for side, ids in (("user", ["ann", "bob", "cat"]), ("item", ["x", "y"]))
    )
    events = pa.RecordBatch.from_pydict(EVENTS)
    writer = EventWriter(tmp_path, users=users, items=items, config=config)
    negatives = pa.RecordBatch.from_pydict(NEGATIVES)
    writer.write_events((events.slice(start, stop - start) for start, stop in pairwise(batch_bounds)), num_events=6)
    writer.write_negatives(
        (negatives.slice(start, stop - start) for start, stop in pairwise(batch_bounds) if start < stop), num_negatives=6
    )
    writer.write_offsets()
    arrays = {path.stem: np.load(path).tolist() for path in tmp_path.glob("*.npy")}
    assert arrays == {
        "event_item": [1, 0, 1, 0, 0, 1],
        "event_time": [10, 20, 30, 5, 15, 25],
        "event_weight": [1, 2, 3, 4, 5, 6],
        "user_offset": [0, 3, 3, 6],
        "train_end": [2, 3, 4],
        "validation_end": [2, 3, 5],
        "train_user": [0, 0, 2],
        "item_count": [2, 1],
        "item_rank": [0, 1],
        "vector_row": [-1, -1],
        "negative_offset": [0, 1, 3, 4, 4, 4, 4, 5, 5, 6],
        "negative_item": [0, 1, 0, 1, 1, 0],
        "negative_event": [1, 2, 2, 3, 3, 5],
    }
    assert pq.read_table(tmp_path / "context.parquet").to_pydict() == {"shop": ["a", "b", None, "d", "e", "f"]}
