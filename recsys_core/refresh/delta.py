"""The delta file of a refresh: the items that a system with its own copy of the vectors has to insert, replace or delete."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recsys_core.refresh.changes import Changes
from recsys_core.refresh.package import stored_vectors
from recsys_core.serving.contents import PackageContents
from recsys_core.serving.quantise import SPACE_ID_KEY

DELTA_NAME = "delta.parquet"


def write_delta(path: Path, changes: Changes, contents: PackageContents) -> None:
    """Write a parquet file with the column `operation` and the columns of items.parquet.

    `upsert`: a new item, or an item with another title or filter column. `delete`: an item that left; only its id is set. The
    metadata of the schema have the space_id.

    contents: the refreshed package.
    """
    num_kept = len(changes.kept_row_I)
    row_L = np.concatenate([changes.changed_row_I, np.arange(num_kept, num_kept + changes.num_added)])
    vector_LD = stored_vectors(contents, row_L)
    # Not a list of fixed size, because pyarrow cannot read such a column with nulls.
    offsets = np.arange(len(row_L) + 1, dtype=np.int32) * vector_LD.shape[1]
    vectors = pa.ListArray.from_arrays(offsets, pa.array(vector_LD.reshape(-1)))
    upserts = changes.columns.take(row_L).append_column("vector", vectors)
    removed_ids = changes.removed_ids.cast(upserts["item_id"].type)
    deletes = pa.table({"item_id": removed_ids})
    operations = ["upsert"] * len(row_L) + ["delete"] * len(removed_ids)
    items = pa.concat_tables([upserts, deletes], promote_options="default")
    table = items.add_column(0, "operation", pa.array(operations, pa.string()))
    pq.write_table(table.replace_schema_metadata({SPACE_ID_KEY: contents.package.space_id}), path)
