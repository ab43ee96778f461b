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
from recsys_core.models.optimizer_config import TableOptimizer
from recsys_core.models.spec import ModelSpec, Side
from recsys_core.models.table_config import OFFSET_TABLE
from recsys_core.models.towers import CandidateTower, QueryTower
from recsys_core.training.optimizers import has_accumulators

ID_FILES = {"item": "items.parquet", OFFSET_TABLE: "items.parquet", "user": "users.parquet"}
"""Table -> file of the interactions stage with the ids of its rows. All other tables belong to features."""
_TEMPERATURE_NAME = "objective.log_temperature"
_EMPTY_HISTORY_NAME = "query.pooling.start"
"""Parameter with the vector of an empty history; exports of early versions do not have it."""


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
    def open(cls, run_id: str, *, train: Path, export: Path, interactions: Path, features: Path) -> Self | None:
        """Open the stage folders of a run; return None if one is missing, damaged or not readable by this version.

        Only the export is verified here. The files of the other stages are verified when they are read (`require_unchanged`).
        """
        train_manifest = load_manifest(train, TrainManifest, verify=False)
        export_manifest = load_manifest(export, ExportManifest)
        interactions_manifest = load_manifest(interactions, InteractionsManifest, verify=False)
        if train_manifest is None or export_manifest is None or interactions_manifest is None:
            return None
        if not all(interactions_manifest.path(name).is_file() for name in interactions_manifest.files):
            return None
        try:
            spec = ModelSpec.model_validate_json(export_manifest.path("model.json").read_bytes())
        except ValueError:
            return None
        features_manifest = load_manifest(features, FeaturesManifest, verify=False) if spec.forms else None
        if spec.forms and features_manifest is None:
            return None
        return cls(run_id, spec, train_manifest, export_manifest, interactions_manifest, features_manifest)


def champion_rows(table: str, *, dataset: Dataset, champion: Champion) -> NDArray[np.int64]:
    """Return for each row of `table` its row in the champion's table, -1 for a new row: int64 [rows].

    Rows are matched by id even if this run's vocabulary continues the champion's. Row numbers are not enough: two runs that
    continue the same vocabulary may give the same row to different ids.

    Raises StageError if a file of the champion has changed.
    """
    if table in ID_FILES:
        return rows_by_id(table, from_stage=dataset.interactions, to_stage=champion.interactions)
    features, old_features = dataset.features, champion.features
    assert features is not None and old_features is not None  # both models have the table
    vocabulary = vocabulary_name(table)
    if vocabulary in features.files:
        return rows_by_value(_column(features, vocabulary, "value"), _column(old_features, vocabulary, "value"))
    # The feature has no vocabulary: its rows are hash values or buckets, with the same numbers in both models. The champion has
    # fewer buckets if some of its quantiles were equal.
    rows = np.arange(features.features[table].rows)
    return np.where(rows < old_features.features[table].rows, rows, -1)


def rows_by_id(table: str, *, from_stage: InteractionsManifest, to_stage: InteractionsManifest) -> NDArray[np.int64]:
    """Return, for each row of `table` in `from_stage`, the row with the same id in `to_stage`, -1 for none.

    Raises StageError if a file of either stage has changed.
    """
    return rows_by_value(_column(from_stage, ID_FILES[table], "id"), _column(to_stage, ID_FILES[table], "id"))


def rows_by_value(values: pa.ChunkedArray, vocabulary: pa.ChunkedArray) -> NDArray[np.int64]:
    """Return the index of each of `values` in `vocabulary`, -1 for none. Null is a value.

    Values of different types are compared as strings: 5 equals "5".

    >>> rows_by_value(pa.chunked_array([["b", "new", "a"]]), pa.chunked_array([["a", "b", "old"]])).tolist()
    [1, -1, 0]
    """
    if values.type != vocabulary.type:
        values, vocabulary = values.cast(pa.string()), vocabulary.cast(pa.string())
    rows = pc.index_in(values, value_set=vocabulary).fill_null(-1)
    return np.asarray(rows.to_numpy(), dtype=np.int64)


def vocabulary_name(feature: str) -> str:
    """Return the file name of a feature's vocabulary; numeric and hashed features have no such file."""
    return f"{feature}.vocabulary.parquet"


def require_unchanged(stage: Manifest, name: str) -> Path:
    """Return the path of a file of `stage`; raise StageError if it differs from its checksum."""
    path: Path = stage.path(name)
    if record_file(path) != stage.files[name]:
        raise StageError(f"{path}: the file has changed since it was written; set training.warm_start to null for this run")
    return path


def _column(stage: Manifest, name: str, column: str) -> pa.ChunkedArray:
    return pq.read_table(require_unchanged(stage, name), columns=[column])[column]


def require_compatible(spec: ModelSpec, *, champion: Champion, dataset: Dataset, optimizer: TableOptimizer) -> None:
    """Raise InputError for the first setting whose new value changes the meaning of the champion's rows or layers.

    optimizer: training.table_optimizer of this run, the optimizer of tables without an `optimizer` setting.
    """
    id_columns = dataset.interactions.id_columns
    if id_columns != champion.interactions.id_columns:
        raise _incompatible("interactions.(user_column, item_column)", id_columns, champion.interactions.id_columns, champion)
    old_architecture = architecture(champion.spec)
    for setting, value in architecture(spec).items():
        if setting not in old_architecture or old_architecture[setting] != value:
            raise _incompatible(setting, value, old_architecture.get(setting), champion)
    for name in carried_tables(spec, champion=champion):
        table, old_table = spec.tables[name], champion.spec.tables[name]
        if table.dim != old_table.dim:
            raise _incompatible(f"the width of tables.{name}", table.dim, old_table.dim, champion)
        _require_same_definition(name, features=dataset.features, champion=champion)
        if has_accumulators(spec, name, default=optimizer) and f"state_{name}.npy" not in champion.export.files:
            kind = (table.settings.optimizer or optimizer).kind
            raise _incompatible(f"the optimizer of table {name}", kind, "one without Adagrad accumulators", champion)


def carried_tables(spec: ModelSpec, *, champion: Champion) -> list[str]:
    """Return the tables whose rows are carried over: the tables that both the champion and this run train."""
    old_tables = champion.spec.tables
    return [
        name for name, table in spec.tables.items() if not table.frozen and name in old_tables and not old_tables[name].frozen
    ]


def architecture(spec: ModelSpec) -> dict[str, object]:
    """Return by name the settings that both models must share. They determine the meaning of layers with equal shapes."""
    config, history = spec.config, spec.config.history
    settings: dict[str, object] = {
        "model.embedding_dim": config.embedding_dim,
        "model.similarity": config.similarity,
        "model.history.pooling": history.pooling,
        "model.history.item_representation": history.item_representation,
    }
    if history.pooling == "recency":
        settings["model.history.length"] = history.length  # the pooling has one weight per history entry
    towers: tuple[tuple[Side, str], ...] = (("query", "query"), ("item", "candidate"))
    for side, name in towers:
        tower, layers = getattr(config, name), getattr(config, f"{name}_layers")
        settings[f"model.{name}.layers"] = layers
        settings[f"model.{name}.skip_connection"] = tower.skip_connection
        settings[f"model.{name}.layer_norm"] = tower.layer_norm
        if layers:  # the layers read the concatenated inputs, so their order matters
            settings[f"the input list of the {name} tower"] = tuple(tower_inputs(spec, side))
    return settings


def tower_inputs(spec: ModelSpec, side: Side) -> list[str]:
    """Return the names of the inputs of a tower, in order."""
    if side == "item":
        return ["item", *spec.features("item")]
    history = spec.config.history
    names = ["history"] * bool(history.length) + ["last_item"] * history.last_item_feature
    return names + ["user"] * spec.config.learn_user_embedding + spec.features("query")


def champion_layers(spec: ModelSpec, *, champion: Champion, dense: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the champion's layers under the names that they have in the new model.

    Parameters that the champion does not have are left out and keep their initial values: the projection of a new feature, a
    learned temperature, the vector of an empty history. The champion's item frequencies are not carried over.

    Args:
        dense: the champion's layers by name.

    Raises InputError if a layer has another shape.
    """
    carried_layers = {}
    for name, shape in _layer_shapes(spec).items():
        old_name = _name_in_champion(name, spec=spec, champion_spec=champion.spec)
        if old_name is None or (name == _EMPTY_HISTORY_NAME and name not in dense):
            continue
        old_shape = tuple(dense[old_name].shape) if old_name in dense else None
        if old_shape != shape:
            raise _incompatible(f"the shape of layer {name}", shape, old_shape, champion)
        carried_layers[name] = dense[old_name]
    if spec.config.learn_temperature and _TEMPERATURE_NAME in dense:
        carried_layers[_TEMPERATURE_NAME] = dense[_TEMPERATURE_NAME]
    return carried_layers


def _layer_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        towers = nn.ModuleDict({"query": QueryTower(spec), "item": CandidateTower(spec)})
    return {name: tuple(parameter.shape) for name, parameter in towers.named_parameters()}


def _name_in_champion(name: str, *, spec: ModelSpec, champion_spec: ModelSpec) -> str | None:
    """Return the champion's name of a layer; None for the projection of an input that the champion does not have.

    Projections are numbered by input, so their numbers change when a feature is added or removed.
    """
    side: Side = "query" if name.startswith("query.") else "item"
    if not name.startswith(f"{side}.tower.projections."):
        return name
    number, parameter = name.split(".")[3:]
    input_name, old_inputs = tower_inputs(spec, side)[int(number)], tower_inputs(champion_spec, side)
    return f"{side}.tower.projections.{old_inputs.index(input_name)}.{parameter}" if input_name in old_inputs else None


def _require_same_definition(name: str, *, features: FeaturesManifest | None, champion: Champion) -> None:
    """Raise InputError if a feature without a vocabulary has another definition than in the champion."""
    old_features = champion.features
    if features is None or old_features is None or name not in features.features:
        return
    if all(vocabulary_name(name) in stage.files for stage in (features, old_features)):
        return
    definition, old_definition = (stage.features[name].definition for stage in (features, old_features))
    if definition != old_definition:
        raise _incompatible(f"the definition of feature {name}", definition, old_definition, champion)


def _incompatible(setting: str, value: object, old_value: object, champion: Champion) -> InputError:
    return InputError(
        f"{setting} is {_value_text(value)} in this run, but {_value_text(old_value)} in the champion (run {champion.run_id}), "
        "from which this training would start; set training.warm_start to null for this run, or go back to the old setting"
    )


def _value_text(value: object) -> str:
    if value is None:
        return "absent"
    return str(list(value)) if isinstance(value, tuple) else str(value)
