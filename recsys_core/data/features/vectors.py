"""Pretrained vectors of a feature's values: whether they can belong to it, and which row of its table has which vector."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import duckdb
import numpy as np
from numpy.typing import NDArray

from recsys_core.data.features.schema import FeatureTable
from recsys_core.errors import InputError
from recsys_core.manifests import IdType
from recsys_core.parquet.duckdb_session import scan

BATCH_ROWS = 1_000_000
IDS = ("item", "user")
"""Tables of the ids themselves; their vectors are the interactions' business."""


def check_vectors(tables: Sequence[FeatureTable], *, id_types: Mapping[str, IdType]) -> None:
    """InputError where vectors are given for no feature, for one without a vocabulary, or under ids of another type.

    id_types: how the ids of each table of vectors are kept, by the table's name.
    """
    features = {f"{table.side}.{feature.name}": (table, feature) for table in tables for feature in table.features}
    for name, kind in id_types.items():
        if name in IDS:
            continue
        if name not in features:
            raise InputError(
                f"embeddings: vectors are given for table {name!r}, but the tables are {', '.join([*IDS, *features])}; "
                "set table to one of these, or declare the feature"
            )
        table, feature = features[name]
        if feature.kind == "numeric" or feature.hash_rows is not None:
            what, way_out = ("numeric", "kind to categorical") if feature.kind == "numeric" else ("hashed", "hash_rows to null")
            raise InputError(
                f"embeddings: vectors are given for table {name!r}, but feature {feature.name!r} of {table.setting} is {what}, "
                f"so that no row of its table stands for one value; set {way_out}, or leave the vectors out"
            )
        values = table.value_type[feature.name]
        if values != kind:
            raise InputError(
                f"{table.sources[0].name}: column {feature.source_column!r} holds {values}, but the ids of the {name} vectors "
                f"are {kind}; write both as one type"
            )


def vector_rows(connection: duckdb.DuckDBPyConnection, ids: Path, *, into_R: NDArray[np.int64]) -> int:
    """Fills `into_R` with the vector of each row of DuckDB's table `vocabulary` (value, row), -1 without; returns how many.

    ids: parquet with the column `id`, in the order of the vectors. into_R: int64, one per row of the feature's table.
    """
    into_R[:] = -1
    found = 0
    vectors = f"(SELECT id, file_row_number AS vector_row FROM {scan(ids, options='file_row_number = true')})"
    reader = connection.sql(
        f"SELECT vocabulary.row, vectors.vector_row FROM vocabulary JOIN {vectors} vectors ON vocabulary.value = vectors.id"
    ).to_arrow_reader(BATCH_ROWS)
    for batch in reader:
        into_R[batch.column("row").to_numpy()] = batch.column("vector_row").to_numpy()
        found += batch.num_rows
    return found
