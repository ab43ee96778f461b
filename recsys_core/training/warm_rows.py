"""Which row of the champion's tables each row of tonight's goes on from.

Rows are found by id, whether or not tonight's vocabulary continues the champion's: two nights may have continued the same one,
and then the rows that they appended mean different ids.
"""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recsys_core.errors import StageError
from recsys_core.manifests import FeaturesManifest, InteractionsManifest, Manifest, record_file
from recsys_core.models.table_config import OFFSET

IDS = {"item": "items.parquet", OFFSET: "items.parquet", "user": "users.parquet"}
"""Where the ids of these tables are; all others are of features."""


def champion_rows(
    table: str,
    *,
    interactions: tuple[InteractionsManifest, InteractionsManifest],
    features: tuple[FeaturesManifest | None, FeaturesManifest | None],
) -> NDArray[np.int64]:
    """For each row of `table` tonight its row in the champion's table, -1 for none: int64 [rows].

    interactions, features: tonight's, then the champion's. Raises StageError when a file of the champion's has changed.
    """
    if table in IDS:
        tonight, before = (_column(stage, IDS[table], "id") for stage in interactions)
        return rows_by_value(tonight, before)
    assert features[0] is not None and features[1] is not None  # the table is in both models
    name = vocabulary_name(table)
    if name not in features[0].files:
        # The same hash, or buckets in the same order; ties among a night's quantiles may have made them fewer.
        row = np.arange(features[0].features[table].rows)
        return np.where(row < features[1].features[table].rows, row, -1)
    tonight, before = (_column(stage, name, "value") for stage in (features[0], features[1]))
    return rows_by_value(tonight, before)


def vocabulary_name(feature: str) -> str:
    """File of the feature's vocabulary; numbers and hashed features have none."""
    return f"{feature}.vocabulary.parquet"


def rows_by_value(tonight: pa.ChunkedArray, before: pa.ChunkedArray) -> NDArray[np.int64]:
    """Where each value of `tonight` stands in `before`, -1 where it does not; null is a value. 5 and "5" are the same.

    >>> rows_by_value(pa.chunked_array([["b", "new", "a"]]), pa.chunked_array([["a", "b", "gone"]])).tolist()
    [1, -1, 0]
    """
    if tonight.type != before.type:
        tonight, before = tonight.cast(pa.string()), before.cast(pa.string())
    found = pc.index_in(tonight, value_set=before).fill_null(-1)
    return np.asarray(found.to_numpy(), dtype=np.int64)


def _column(stage: Manifest, name: str, column: str) -> pa.ChunkedArray:
    path: Path = stage.path(name)
    if record_file(path) != stage.files[name]:
        raise StageError(f"{path}: changed since it was written; set training.warm_start to null for this night")
    return pq.read_table(path, columns=[column])[column]
