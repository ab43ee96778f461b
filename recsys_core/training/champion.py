"""The model that a night starts from: what its run left behind."""

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
from recsys_core.models.table_config import OFFSET
from recsys_core.models.towers import CandidateTower, QueryTower
from recsys_core.training.optimizers import has_sums


@dataclass(frozen=True)
class Champion:
    """Stages of the run `run_id`, and the model that it trained."""

    run_id: str
    spec: ModelSpec
    train: TrainManifest
    export: ExportManifest
    interactions: InteractionsManifest
    features: FeaturesManifest | None

    @classmethod
    def open(cls, run_id: str, *, train: Path, export: Path, interactions: Path, features: Path) -> Self | None:
        """From the folders of the stages; None unless all that the model has is there, and readable by this version.

        The export is compared with its checksums. Of the others only a few files are read, and those are looked at then.
        """
        trained = load_manifest(train, TrainManifest, verify=False)
        exported = load_manifest(export, ExportManifest)
        log = load_manifest(interactions, InteractionsManifest, verify=False)
        if trained is None or exported is None or log is None or not all(log.path(name).is_file() for name in log.files):
            return None
        try:
            spec = ModelSpec.model_validate_json(exported.path("model.json").read_bytes())
        except ValueError:
            return None
        described = load_manifest(features, FeaturesManifest, verify=False) if spec.forms else None
        if spec.forms and described is None:
            return None
        return cls(run_id, spec, trained, exported, log, described)


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


SIDES: tuple[Side, Side] = ("query", "item")
_TEMPERATURE = "objective.log_temperature"
_START = "query.pooling.start"
"""The vector of an empty history; exports of versions before it do not have it."""


def require_fit(
    spec: ModelSpec,
    *,
    champion: Champion,
    dataset: Dataset,
    optimizer: TableOptimizer,
) -> None:
    """InputError for the first setting under which the champion's values would mean something else.

    optimizer: tonight's, of the tables without one of their own.
    """
    interactions = dataset.interactions
    if interactions.id_columns != champion.interactions.id_columns:
        raise _misfit(
            "interactions.(user_column, item_column)", interactions.id_columns, champion.interactions.id_columns, champion
        )
    before = architecture(champion.spec)
    for setting, value in architecture(spec).items():
        if setting not in before or before[setting] != value:
            raise _misfit(setting, value, before.get(setting), champion)
    for name in carried_tables(spec, champion=champion):
        table, old = spec.tables[name], champion.spec.tables[name]
        if table.dim != old.dim:
            raise _misfit(f"tables.{name}: the width", table.dim, old.dim, champion)
        _require_same_values(name, features=dataset.features, champion=champion)
        if has_sums(spec, name, default=optimizer) and f"state_{name}.npy" not in champion.export.files:
            kind = (table.settings.optimizer or optimizer).kind
            raise _misfit(f"the optimizer of table {name}", kind, "one without Adagrad's sums, which it needs", champion)


def carried_tables(spec: ModelSpec, *, champion: Champion) -> list[str]:
    """Tables whose rows go on: trained by the champion, and to be trained tonight. A frozen one has tonight's vectors."""
    before = champion.spec.tables
    return [name for name, table in spec.tables.items() if not table.frozen and name in before and not before[name].frozen]


def architecture(spec: ModelSpec) -> dict[str, object]:
    """By setting what has to be equal for layers and rows to mean the same; their shapes alone would not tell."""
    config = spec.config
    told: dict[str, object] = {"model.embedding_dim": config.embedding_dim, "model.similarity": config.similarity}
    told |= {f"model.history.{name}": getattr(config.history, name) for name in ("pooling", "items")}
    if config.history.pooling == "recency":
        told["model.history.length"] = config.history.length  # one weight for each place
    towers = (("query", config.query, config.query_layers), ("candidate", config.candidate, config.candidate_layers))
    for (name, tower, layers), side in zip(towers, SIDES, strict=True):
        told |= {f"model.{name}.layers": layers}
        told |= {f"model.{name}.{setting}": getattr(tower, setting) for setting in ("skip_connection", "layer_norm")}
        if layers:  # over the inputs side by side: another order would be another model
            told[f"what the {name} tower's layers read"] = tuple(tower_inputs(spec, side))
    return told


def tower_inputs(spec: ModelSpec, side: Side) -> list[str]:
    """Names of what the tower of `side` reads, in order."""
    if side == "item":
        return ["item", *spec.features("item")]
    history = spec.config.history
    names = ["history"] * bool(history.length) + ["last_item"] * history.last_item
    return names + ["user"] * spec.config.user_id + spec.features("query")


def champion_layers(spec: ModelSpec, *, champion: Champion, dense: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`dense`, the champion's layers by name, under the names that they have in tonight's model.

    What only tonight's model has, the projection of a new feature, a temperature to be learned or the vector of an empty
    history, is left out and starts as in a full training. What the champion keeps count of (how often it met an item) belongs
    to its night and stays behind. Raises InputError when a layer has another shape.
    """
    carried = {}
    for name, shape in _layer_shapes(spec).items():
        old = _name_before(name, spec=spec, before=champion.spec)
        if old is None or (name == _START and name not in dense):
            continue
        if old not in dense or tuple(dense[old].shape) != shape:
            found = tuple(dense[old].shape) if old in dense else "not there"
            raise _misfit(f"the layer {name}", shape, found, champion)
        carried[name] = dense[old]
    if spec.config.learn_temperature and _TEMPERATURE in dense:
        carried[_TEMPERATURE] = dense[_TEMPERATURE]
    return carried


def _layer_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        sides = nn.ModuleDict({"query": QueryTower(spec), "item": CandidateTower(spec)})
    return {name: tuple(parameter.shape) for name, parameter in sides.named_parameters()}


def _name_before(name: str, *, spec: ModelSpec, before: ModelSpec) -> str | None:
    """What the champion calls the layer `name`; None for the projection of an input that it has not.

    Projections are numbered by input, so a feature more or less in front of one gives it another number.
    """
    side: Side = "query" if name.startswith("query.") else "item"
    rest = name.partition(".")[2]
    if not rest.startswith("tower.projections."):
        return name
    _, _, number, parameter = rest.split(".")
    inputs, source = tower_inputs(before, side), tower_inputs(spec, side)[int(number)]
    return f"{side}.tower.projections.{inputs.index(source)}.{parameter}" if source in inputs else None


def _require_same_values(name: str, *, features: FeaturesManifest | None, champion: Champion) -> None:
    """InputError where the rows of a feature without a vocabulary stand for other values than the champion's."""
    old = champion.features
    if features is None or old is None or name not in features.features:
        return
    vocabularies = [vocabulary_name(name) in stage.files for stage in (features, old)]
    tonight, before = (stage.features[name].definition for stage in (features, old))
    if vocabularies != [True, True] and tonight != before:
        raise _misfit(f"features: how {name} is read", tonight, before, champion)


def _misfit(what: str, tonight: object, before: object, champion: Champion) -> InputError:
    return InputError(
        f"{what} is {_shown(tonight)} tonight, and {_shown(before)} in the champion (run {champion.run_id}) that the night "
        "would start from; set training.warm_start to null for this night, or go back to the old setting"
    )


def _shown(value: object) -> str:
    if value is None:
        return "not there"
    return str(list(value)) if isinstance(value, tuple) else str(value)
