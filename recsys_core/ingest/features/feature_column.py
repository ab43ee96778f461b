"""FeatureColumn: one feature during its encoding, with its values in DuckDB and its files in the folder of the stage.

A feature has one of the owner kinds user, item and context. Context features belong to events.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
from numpy.typing import NDArray

from recsys_core.dataset.layout import allocate_npy
from recsys_core.ingest.features.config import FeatureConfig
from recsys_core.manifests import IdType, IngestedFeature
from recsys_core.parquet.duckdb_session import fetch_count

BATCH_ROWS = 1_000_000


@dataclass(frozen=True)
class PreviousFeature:
    """The same feature in the previous run."""

    ingested_feature: IngestedFeature
    vocabulary_path: Path | None
    """None for a feature without a vocabulary."""


@dataclass(frozen=True)
class FeatureColumn:
    """One feature during its encoding.

    Its values are in DuckDB's table `joined`, which has one row for each user, item or event with features, and the columns:

    - row: the row of the user, item or event.
    - in_training: whether the user or item has a training event; for a context feature, whether the event is a training event.
    - v<n>, w<n>: the value (or list of values) and the list of weights of the feature with index n.
    """

    connection: duckdb.DuckDBPyConnection
    feature: FeatureConfig
    feature_index: int
    """Index of the feature among the features of its owner kind."""
    key: str
    """<owner_kind>.<name>, with which the names of the feature's files start."""
    value_type: IdType | None
    """Type in which the values are stored; None for a numeric feature."""
    num_rows: int
    """Number of users, items or events."""
    counted_row_sql: str
    """SQL condition on the rows of `joined`; values in the other rows do not count for the vocabulary."""
    previous: PreviousFeature | None
    """The feature in the previous run, whose vocabulary, boundaries or mean are reused; None to compute them again."""
    output_folder: Path
    vector_ids_path: Path | None = None
    """Parquet file with the value of each pretrained vector; None if there are no vectors."""

    def value_sql(self) -> str:
        """Return SQL for the value; for a list feature, for the first `max_values` values."""
        return self._truncated_sql(f"v{self.feature_index}")

    def weight_sql(self) -> str:
        """Return SQL for the weights of the values."""
        return self._truncated_sql(f"w{self.feature_index}")

    def _truncated_sql(self, column_name: str) -> str:
        return column_name if self.feature.max_values is None else f"{column_name}[:{self.feature.max_values}]"

    def fetch_count(self, query: str) -> int:
        """Return the single number that `query` selects."""
        return fetch_count(self.connection, query)

    def allocate(self, array_name: str, *, dtype: type[np.generic], length: int) -> NDArray[Any]:
        """Create a file of the feature; return it as a memory-mapped array of zeros."""
        return allocate_npy(self.output_folder / f"{self.key}.{array_name}.npy", dtype=dtype, shape=(length,))

    def manifest_entry(self, **fields: Any) -> IngestedFeature:
        """Return the entry of the feature in the manifest. fields: the fields that depend on the values."""
        return IngestedFeature(
            kind=self.feature.kind,
            definition=feature_definition(self.feature, self.value_type),
            is_continued=self.previous is not None,
            column=self.feature.source_column,
            weight_column=self.feature.weight_column,
            value_type=self.value_type,
            hash_rows=self.feature.hash_rows,
            max_values=self.feature.max_values,
            **fields,
        )


def feature_definition(feature: FeatureConfig, value_type: IdType | None) -> str:
    """Return the settings that decide the row of a value, as JSON. If they change, a new vocabulary is built."""
    settings: dict[str, Any] = {"kind": feature.kind, "column": feature.source_column, "type": value_type}
    settings |= {setting: getattr(feature, setting) for setting in ("max_rows", "hash_rows", "buckets", "boundaries")}
    settings["standardise"] = feature.standardise or None
    return json.dumps({setting: value for setting, value in settings.items() if value is not None})
