"""The champion of a warm start: the model of an earlier run, its rows by id, and its compatibility with the new model."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from recsys_core.dataset.layout import vocabulary_file
from recsys_core.errors import InputError, StageError
from recsys_core.manifests import (
    Dataset,
    ExportManifest,
    FeaturesManifest,
    InteractionsManifest,
    Manifest,
    TrainManifest,
    load_manifest,
    record_file,
)
from recsys_core.models.ensemble import make_candidate_tower, make_query_tower
from recsys_core.models.spec import ModelSpec, Side
from recsys_core.models.tables.table_config import ITEM_TABLES
from recsys_core.training.model.optimizers import has_accumulators

ID_FILE_BY_TABLE = {
    **dict.fromkeys(ITEM_TABLES, vocabulary_file("item")),
    "user": vocabulary_file("user"),
}
"""File of the interactions stage that has the id of each row, by table. All other tables belong to features."""
_TEMPERATURE_PATH = "objective.log_temperature"
_EMPTY_HISTORY_SUFFIX = ".pooling.start"
"""Parameter with the vector of an empty history; exports of early versions do not have it."""
_POPULARITY_PATH = "query.popularity.weight"
"""Parameter with the weight of the popularity. If the champion does not have it, it starts from 0."""


@dataclass(frozen=True)
class Champion:
    """The champion's model and the stages of its run."""

    run_id: str
    spec: ModelSpec
    train: TrainManifest
    export: ExportManifest
    interactions: InteractionsManifest
    features: FeaturesManifest | None

    @classmethod
    def in_run(cls, run_id: str, folder: Path) -> Self | None:
        """Open the stages in the folder of a run; see `open`."""
        return cls.open(
            run_id,
            train_folder=folder / TrainManifest.stage,
            export_folder=folder / ExportManifest.stage,
            interactions_folder=folder / InteractionsManifest.stage,
            features_folder=folder / FeaturesManifest.stage,
        )

    @classmethod
    def open(
        cls, run_id: str, *, train_folder: Path, export_folder: Path, interactions_folder: Path, features_folder: Path
    ) -> Self | None:
        """Open the stage folders of a run; return None if a stage is missing, damaged or not readable by this version.

        Only the export is verified here. The files of the other stages are verified when they are read (`require_unchanged`).
        """
        train_manifest = load_manifest(train_folder, TrainManifest, verify=False)
        export_manifest = load_manifest(export_folder, ExportManifest)
        interactions_manifest = load_manifest(interactions_folder, InteractionsManifest, verify=False)
        if train_manifest is None or export_manifest is None or interactions_manifest is None:
            return None
        if not all(interactions_manifest.path(name).is_file() for name in interactions_manifest.files):
            return None
        try:
            spec = ModelSpec.model_validate_json(export_manifest.path("model.json").read_bytes())
        except ValueError:
            return None
        features_manifest = load_manifest(features_folder, FeaturesManifest, verify=False) if spec.forms else None
        if spec.forms and features_manifest is None:
            return None
        return cls(run_id, spec, train_manifest, export_manifest, interactions_manifest, features_manifest)


def champion_rows(table_name: str, *, dataset: Dataset, champion: Champion) -> NDArray[np.int64]:
    """Return, for each row of a table, its row in the champion's table: int64 [rows], -1 for a new row.

    Rows are always matched by id. Equal row numbers are not enough: if this run and the champion continue the vocabulary of the
    same earlier run, they may give the same new row to different ids.

    Raises StageError if a file of the champion has changed.
    """
    if table_name in ID_FILE_BY_TABLE:
        return match_rows_by_id(table_name, from_stage=dataset.interactions, to_stage=champion.interactions)
    features, champion_features = dataset.features, champion.features
    assert features is not None and champion_features is not None  # both models have the table
    file_name = vocabulary_file_name(table_name)
    if file_name in features.files:
        return match_rows_by_value(
            _read_column(features, file_name, "value"), _read_column(champion_features, file_name, "value")
        )
    # Without a vocabulary, the rows of the feature are hash values or buckets, which have the same numbers in both models. One
    # model may have fewer buckets than the other, because equal quantiles become one bucket.
    rows = np.arange(features.features[table_name].num_rows)
    return np.where(rows < champion_features.features[table_name].num_rows, rows, -1)


def match_rows_by_id(table_name: str, *, from_stage: InteractionsManifest, to_stage: InteractionsManifest) -> NDArray[np.int64]:
    """Return, for each row of a table in `from_stage`, the row with the same id in `to_stage`, -1 for none.

    Raises StageError if a file of either stage has changed.
    """
    return match_rows_by_value(
        _read_column(from_stage, ID_FILE_BY_TABLE[table_name], "id"), _read_column(to_stage, ID_FILE_BY_TABLE[table_name], "id")
    )


def match_rows_by_value(values: pa.ChunkedArray, vocabulary: pa.ChunkedArray) -> NDArray[np.int64]:
    """Return the index of each of `values` in `vocabulary`, -1 for none. A null matches a null.

    Values of different types are compared as strings: 5 equals "5".

    >>> match_rows_by_value(pa.chunked_array([["b", "new", "a"]]), pa.chunked_array([["a", "b", "old"]])).tolist()
    [1, -1, 0]
    """
    if values.type != vocabulary.type:
        values, vocabulary = values.cast(pa.string()), vocabulary.cast(pa.string())
    rows = pc.index_in(values, value_set=vocabulary).fill_null(-1)
    return np.asarray(rows.to_numpy(), dtype=np.int64)


def vocabulary_file_name(feature_name: str) -> str:
    """Return the file name of a feature's vocabulary; numeric and hashed features have no such file."""
    return f"{feature_name}.vocabulary.parquet"


def require_unchanged(stage: Manifest, file_name: str) -> Path:
    """Return the path of a file of `stage`; raise StageError if it differs from its checksum."""
    path: Path = stage.path(file_name)
    if record_file(path) != stage.files[file_name]:
        raise StageError(f"{path}: the file has changed since it was written; set training.warm_start to null for this run")
    return path


def _read_column(stage: Manifest, file_name: str, column_name: str) -> pa.ChunkedArray:
    return pq.read_table(require_unchanged(stage, file_name), columns=[column_name])[column_name]


def require_compatible(spec: ModelSpec, *, champion: Champion, dataset: Dataset) -> None:
    """Raise InputError for the first setting whose new value changes the meaning of the champion's rows or layers."""
    id_columns = dataset.interactions.id_columns
    if id_columns != champion.interactions.id_columns:
        raise _incompatible_error(
            "interactions.(user_column, item_column)", id_columns, champion.interactions.id_columns, champion
        )
    champion_settings = architecture_settings(champion.spec)
    for setting, new_value in architecture_settings(spec).items():
        if setting not in champion_settings or champion_settings[setting] != new_value:
            raise _incompatible_error(setting, new_value, champion_settings.get(setting), champion)
    carried_tables = carried_table_names(spec, champion=champion)
    for table_name, table in spec.tables.items():
        if table_name not in champion.spec.tables:
            continue
        dim, champion_dim = spec.member_dim(table_name), champion.spec.member_dim(table_name)
        if dim != champion_dim:
            raise _incompatible_error(f"the width of tables.{table_name}", dim, champion_dim, champion)
        _require_same_inputs(table_name, spec=spec, champion=champion)
        if table_name not in carried_tables:
            continue
        _require_same_definition(table_name, features=dataset.features, champion=champion)
        if has_accumulators(table) and f"state_{table_name}.npy" not in champion.export.files:
            raise _incompatible_error(
                f"the optimizer of table {table_name}", table.optimizer.kind, "one without Adagrad accumulators", champion
            )


def _require_same_inputs(table_name: str, *, spec: ModelSpec, champion: Champion) -> None:
    """Raise InputError if the layers would read vectors of another scale from a table that both models have."""
    table, champion_table = spec.tables[table_name], champion.spec.tables[table_name]
    is_list = spec.forms.get(table_name) in ("list", "weighted_list")
    is_frozen = table.is_frozen and champion_table.is_frozen
    for setting, is_compared in (
        ("pooling", is_list),
        ("rescale", is_frozen),
        ("init_std", is_frozen and table.settings.rescale),  # the norm of a random row, to which the vectors are scaled
    ):
        new_value, champion_value = getattr(table.settings, setting), getattr(champion_table.settings, setting)
        if is_compared and new_value != champion_value:
            raise _incompatible_error(f"tables.{table_name}.{setting}", new_value, champion_value, champion)


def carried_table_names(spec: ModelSpec, *, champion: Champion) -> list[str]:
    """Return the tables whose rows are carried over: the tables that both the champion and this run train."""
    champion_tables = champion.spec.tables
    return [
        table_name
        for table_name, table in spec.tables.items()
        if not table.is_frozen and table_name in champion_tables and not champion_tables[table_name].is_frozen
    ]


def architecture_settings(spec: ModelSpec) -> dict[str, object]:
    """Return the settings that must be equal in both models, value by setting.

    With other settings, layers of the same shape would have another meaning.
    """
    config = spec.config
    value_by_setting: dict[str, object] = {
        "model.embedding_dim": config.embedding_dim,
        "model.num_members": config.num_members,
        "model.similarity": config.similarity,
    } | config.history.architecture()
    towers: tuple[tuple[Side, str], ...] = (("query", "query"), ("item", "candidate"))
    for side, tower_name in towers:
        tower_config, layers = getattr(config, tower_name), getattr(config, f"{tower_name}_layers")
        value_by_setting[f"model.{tower_name}.layers"] = layers
        value_by_setting[f"model.{tower_name}.skip_connection"] = tower_config.skip_connection
        value_by_setting[f"model.{tower_name}.layer_norm"] = tower_config.layer_norm
        if layers:  # the layers read the concatenated inputs, so their order matters
            value_by_setting[f"the input list of the {tower_name} tower"] = tuple(tower_input_names(spec, side))
    return value_by_setting


def tower_input_names(spec: ModelSpec, side: Side) -> list[str]:
    """Return the names of the inputs of a tower, in order."""
    if side == "item":
        return ["item", *spec.features("item")]
    return spec.config.history.input_names + ["user"] * spec.config.learn_user_embedding + spec.features("query")


def champion_parameters(spec: ModelSpec, *, champion: Champion, champion_tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the champion's parameters, named as in the new model.

    Parameters that the champion does not have are left out and keep their initial values: the projection of a new feature, a
    learned temperature, the vector of an empty history, the weight of the popularity. The champion's item frequencies are not
    carried over.

    Args:
        champion_tensors: the champion's parameters, by name.

    Raises InputError if a parameter has another shape.
    """
    carried_tensor_by_name = {}
    for parameter_path, shape in _shape_by_parameter(spec).items():
        champion_path = _champion_parameter_path(parameter_path, spec=spec, champion_spec=champion.spec)
        is_optional = parameter_path.endswith((_EMPTY_HISTORY_SUFFIX, _POPULARITY_PATH))
        if champion_path is None or (is_optional and parameter_path not in champion_tensors):
            continue
        champion_shape = tuple(champion_tensors[champion_path].shape) if champion_path in champion_tensors else None
        if champion_shape != shape:
            raise _incompatible_error(f"the shape of layer {parameter_path}", shape, champion_shape, champion)
        carried_tensor_by_name[parameter_path] = champion_tensors[champion_path]
    if spec.config.learn_temperature and _TEMPERATURE_PATH in champion_tensors:
        carried_tensor_by_name[_TEMPERATURE_PATH] = champion_tensors[_TEMPERATURE_PATH]
    return carried_tensor_by_name


def _shape_by_parameter(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        towers = nn.ModuleDict({"query": make_query_tower(spec), "item": make_candidate_tower(spec)})
    return {name: tuple(parameter.shape) for name, parameter in towers.named_parameters()}


def _champion_parameter_path(parameter_path: str, *, spec: ModelSpec, champion_spec: ModelSpec) -> str | None:
    """Return the path of a parameter in the champion; None for the projection of an input that the champion does not have.

    Projections are numbered by input, so their numbers change when a feature is added or removed.
    """
    side: Side = "query" if parameter_path.startswith("query.") else "item"
    tower_name, separator, projection_path = parameter_path.partition(".tower.projections.")
    if not separator:
        return parameter_path
    input_index, parameter_name = projection_path.split(".")
    input_name, champion_inputs = tower_input_names(spec, side)[int(input_index)], tower_input_names(champion_spec, side)
    return (
        f"{tower_name}.tower.projections.{champion_inputs.index(input_name)}.{parameter_name}"
        if input_name in champion_inputs
        else None
    )


def _require_same_definition(feature_name: str, *, features: FeaturesManifest | None, champion: Champion) -> None:
    """Raise InputError if a feature without a vocabulary is defined differently in the champion."""
    champion_features = champion.features
    if features is None or champion_features is None or feature_name not in features.features:
        return
    if all(vocabulary_file_name(feature_name) in stage.files for stage in (features, champion_features)):
        return
    definition, champion_definition = (stage.features[feature_name].definition for stage in (features, champion_features))
    if definition != champion_definition:
        raise _incompatible_error(f"the definition of feature {feature_name}", definition, champion_definition, champion)


def _incompatible_error(setting: str, new_value: object, champion_value: object, champion: Champion) -> InputError:
    return InputError(
        f"{setting} is {_value_text(new_value)} in this run, but {_value_text(champion_value)} in the champion "
        f"(run {champion.run_id}), from which this training would start; set training.warm_start to null for this run, or go "
        "back to the old setting"
    )


def _value_text(value: object) -> str:
    if value is None:
        return "absent"
    return str(list(value)) if isinstance(value, tuple) else str(value)
