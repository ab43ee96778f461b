"""The feature table of items, read after a training. Its features are encoded as in that training."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from recsys_core.dataset.feature_store import FeatureStore, feature_form
from recsys_core.dataset.layout import ITEM_COLUMNS_FILE, ITEM_TITLES_FILE
from recsys_core.errors import InputError
from recsys_core.ingest.features.config import FeatureConfig, FeaturesConfig, ItemTableConfig
from recsys_core.ingest.features.encoding import encode
from recsys_core.ingest.features.feature_column import FeatureColumn, PreviousFeature, feature_definition
from recsys_core.ingest.features.feature_schema import FeatureTable, open_feature_tables
from recsys_core.ingest.features.sources import TableSource
from recsys_core.manifests import IdType, IngestedFeature
from recsys_core.parquet.duckdb_session import SQL_TYPE, database, quoted, scan_all_sql
from recsys_core.parquet.local_copies import local_files


@dataclass(frozen=True)
class LaterItems:
    """The features, titles and filter columns of some items.

    Attributes:
        features: the features by key, in the order of the items.
        column_paths: files with the column `row` and the titles and filter columns, as in FeaturesManifest.
        row_path: the file among `column_paths` that has a row for every item of the feature table.
    """

    features: FeatureStore
    column_paths: tuple[Path, ...]
    row_path: Path


class LaterItemTable:
    """The feature table of items, to be read with the encodings of an earlier ingest."""

    def __init__(
        self,
        config: ItemTableConfig,
        *,
        encodings: Mapping[str, IngestedFeature],
        id_type: IdType,
        memory_limit: str,
        threads: int | None,
        allowed_data_root: Path | None,
    ) -> None:
        """Open the table, and check its files and columns.

        Args:
            encodings: the features to read, by item.<name>. Other features of the config are ignored.
            id_type: type of the item ids in the earlier ingest.

        Raises:
            InputError: a file or a column is missing or unsuitable, or a feature has another definition than in the earlier
                ingest.
        """
        self._encodings, self._memory_limit, self._threads = encodings, memory_limit, threads
        encoded_features = tuple(feature for feature in config.features if f"item.{feature.name}" in encodings)
        (self._table,) = open_feature_tables(
            FeaturesConfig.model_construct(
                users=None, items=config.model_copy(update={"features": encoded_features}), context=()
            ),
            user_id_type=id_type,
            item_id_type=id_type,
            context_sources=(),
            allowed_data_root=allowed_data_root,
        )
        for key, encoding in encodings.items():
            _require_same_definition(key, encoding, self._table)

    def ids(self, *, folder: Path) -> pa.Array:
        """Return the distinct ids of the table in ascending order, except ids that an item cannot have.

        An item cannot have a null, an empty string or a number above int64 as its id. `read` rejects the null and the number.

        folder: folder to create for temporary files.
        """
        table = self._table
        assert table.id_column is not None and table.id_type is not None
        folder.mkdir()
        with (
            local_files(table.sources, columns=[table.id_column], scratch_folder=folder) as paths,
            database(
                memory_limit=self._memory_limit, num_threads=self._threads, spill_folder=folder / "spill", subject="the items"
            ) as connection,
        ):
            id_sql = f"TRY_CAST({quoted(table.id_column)} AS {SQL_TYPE[table.id_type]})"
            # The condition is not true for an empty id or a null. TRY_CAST converts an id that is too large for int64 to null.
            query = f"SELECT DISTINCT id FROM (SELECT {id_sql} AS id FROM {scan_all_sql(paths)}) WHERE id::VARCHAR != ''"
            return connection.sql(f"{query} ORDER BY id").to_arrow_table()["id"].combine_chunks()

    def read(self, item_ids: pa.Array, *, vocabulary_folder: Path, folder: Path) -> LaterItems:
        """Read the table's rows of these items. A value that the earlier ingest did not have gets the row of unknown values.

        Args:
            vocabulary_folder: folder with the vocabularies of the earlier ingest.
            folder: folder to create for the arrays and files.

        Raises:
            InputError: a row of the table is invalid, or the table has none of the items.
        """
        folder.mkdir()
        ids_path = folder / "items.parquet"
        pq.write_table(pa.table({"id": item_ids, "train_count": pa.repeat(pa.scalar(0), len(item_ids))}), ids_path)
        source = TableSource(self._table, len(item_ids), ids_path)
        with database(
            memory_limit=self._memory_limit, num_threads=self._threads, spill_folder=folder / "spill", subject="the features"
        ) as connection:
            source.load(connection, output_folder=folder, scratch_folder=folder)
            for feature_index, feature in enumerate(self._table.features):
                key = f"item.{feature.name}"
                encode(
                    FeatureColumn(
                        connection=connection,
                        feature=feature,
                        feature_index=feature_index,
                        key=key,
                        value_type=self._table.value_type_by_feature.get(feature.name),
                        num_rows=len(item_ids),
                        counted_row_sql="FALSE",  # no value gets a new row
                        previous=_earlier_feature(key, self._encodings[key], vocabulary_folder),
                        output_folder=folder,
                    )
                )
        column_paths = (folder / ITEM_TITLES_FILE, folder / ITEM_COLUMNS_FILE)
        return LaterItems(
            features=FeatureStore.read(folder, {key: feature_form(encoding) for key, encoding in self._encodings.items()}),
            column_paths=tuple(path for path in column_paths if path.is_file()),
            row_path=folder / ITEM_COLUMNS_FILE,
        )


def _earlier_feature(key: str, encoding: IngestedFeature, vocabulary_folder: Path) -> PreviousFeature:
    """Return the feature of the earlier ingest, whose vocabulary is in `vocabulary_folder`."""
    has_vocabulary = encoding.kind != "numeric" and encoding.hash_rows is None
    return PreviousFeature(encoding, vocabulary_folder / f"{key}.vocabulary.parquet" if has_vocabulary else None)


def _require_same_definition(key: str, encoding: IngestedFeature, table: FeatureTable) -> None:
    """Raise InputError if the config does not declare the feature `key`, or has other settings for it than `encoding`."""
    feature = _feature_named(key, table.features)
    if feature is None:
        raise InputError(
            f"features.items: the served model reads the feature {key}, but the config does not declare it; declare it again, "
            "or train a new model with `nightjar run`"
        )
    definition = feature_definition(feature, table.value_type_by_feature.get(feature.name))
    for setting, config_value, trained_value in (
        ("definition", definition, encoding.definition),
        ("weight_column", feature.weight_column, encoding.weight_column),
        ("max_values", feature.max_values, encoding.max_values),
    ):
        if config_value != trained_value:
            raise InputError(
                f"features.items: feature {feature.name!r} has the {setting} {config_value}, but the served model was trained "
                f"with {trained_value}; go back to it, or train a new model with `nightjar run`"
            )


def _feature_named(key: str, features: Sequence[FeatureConfig]) -> FeatureConfig | None:
    return next((feature for feature in features if f"item.{feature.name}" == key), None)
