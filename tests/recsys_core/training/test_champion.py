"""Compatibility of the champion with the settings of a run, checked before the launch; when to train from scratch."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch

from recsys_core.errors import InputError
from recsys_core.manifests import Dataset, ExportManifest, FeatureFacts, FeaturesManifest, PlanManifest, TrainManifest, produce
from recsys_core.models.config import TwoTowerConfig
from recsys_core.models.loss_config import LossConfig
from recsys_core.models.optimizer_config import TableOptimizer
from recsys_core.models.spec import ModelSpec
from recsys_core.models.table_config import TableConfig
from recsys_core.training.champion import Champion, carried_tables, champion_layers, require_compatible
from recsys_core.training.config import TrainingConfig, WarmStartConfig
from recsys_core.training.train import choose_start, train
from tests.recsys_core.data.interaction_logs import ingest
from tests.recsys_core.data.parquet_files import write
from tests.recsys_core.training.consecutive_runs import Night, make_night

WAY_OUT = "set training.warm_start to null for this run, or go back to the old setting"
ADAGRAD = TableOptimizer()


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory) -> Night:
    return make_night(tmp_path_factory.mktemp("nights") / "night", 1)


@pytest.fixture(scope="module")
def champion(night: Night) -> Champion:
    """A champion with the same model; the files of its tables are empty."""

    def build(out: Path) -> dict[str, Any]:
        for table in night.spec.tables:
            (out / f"state_{table}.npy").touch()
        (out / "model.json").write_text(night.spec.model_dump_json())
        return {"num_items": 1, "dim": 8, "similarity": "cosine", "num_queries": {}}

    produce(night.folder / "export", ExportManifest, fingerprint="export", build=build)
    produce(night.folder / "train", TrainManifest, fingerprint="train", build=lambda out: TRAINED)
    found = open_champion(night)
    assert found is not None
    return found


TRAINED = {
    "world_size": 2,
    "steps": 1,
    "epochs": 1,
    "examples": 1,
    "final_loss": 1.0,
    "samples_per_s": 1.0,
    "attempts": 1,
    "best_epoch": None,
    "validation": {},
    "num_warm_starts": 3,
}


def open_champion(night: Night) -> Champion | None:
    return Champion.open("first", **{name: night.folder / name for name in ("train", "export", "interactions", "features")})


def changed(night: Night, *, tables: dict[str, TableConfig] | None = None, **settings: Any) -> ModelSpec:
    """The model with other settings."""
    config = TwoTowerConfig.model_validate(night.spec.config.model_dump() | settings)
    return ModelSpec.of(config, dataset=Dataset(night.interactions, features=night.features), tables=tables)


def fit(night: Night, champion: Champion, spec: ModelSpec, *, optimizer: TableOptimizer = ADAGRAD) -> None:
    require_compatible(
        spec, champion=champion, dataset=Dataset(night.interactions, features=night.features), optimizer=optimizer
    )


def test_an_equal_model_is_compatible_also_with_other_training_settings(night: Night, champion: Champion) -> None:
    fit(night, champion, night.spec)
    history = night.spec.config.history.model_dump() | {"length": 9, "item_dropout": 0.5}
    fit(night, champion, changed(night, history=history, temperature=0.5, learn_temperature=True))
    fit(night, champion, night.spec, optimizer=TableOptimizer(kind="sgd"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"embedding_dim": 16}, r"model.embedding_dim is 16 in this run, but 8 in the champion \(run first\)"),
        ({"query": {"layers": [16, 8]}}, r"model.query.layers is \[16, 8\] in this run, but \[8\] in the champion"),
        ({"candidate": {"layers": [8]}}, r"model.candidate.layers is \[8\] in this run, but \[\] in the champion"),
        ({"similarity": "dot"}, "model.similarity is dot in this run, but cosine in the champion"),
        (
            {"user_id": False},
            r"the input list of the query tower is \['history', 'last_item'\] in this run, but .*'user'\]",
        ),
        ({"tables": {"user": TableConfig(dim=12)}}, "the width of tables.user is 12 in this run, but 8 in the champion"),
    ],
)
def test_another_architecture_is_rejected_with_the_setting_and_both_values(
    night: Night, champion: Champion, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=f"{message}.*{WAY_OUT}"):
        fit(night, champion, changed(night, **settings))


def test_adagrad_rejects_a_champion_without_accumulators(night: Night, champion: Champion) -> None:
    export = champion.export.model_copy(update={"files": {}})
    with pytest.raises(
        InputError, match="optimizer of table item is adagrad in this run, but one without Adagrad accumulators"
    ):
        fit(night, replace(champion, export=export), night.spec, optimizer=TableOptimizer(kind="adagrad"))


def test_a_champion_with_another_id_column_is_rejected(night: Night, champion: Champion) -> None:
    other = champion.interactions.model_copy(update={"id_columns": ("user_id", "sku")})
    with pytest.raises(InputError, match=r"item_column\) is .*item_id.* in this run, but .*sku"):
        fit(night, replace(champion, interactions=other), night.spec)


def facts(definition: str) -> FeatureFacts:
    return FeatureFacts(
        kind="categorical", rows=5, values=3, out_of_vocabulary=0, missing=0, definition=definition, continued=False
    )


def described(night: Night, **definitions: str) -> FeaturesManifest:
    """The features, with hashed ones added: definitions by name."""
    hashed = {f"item.{name}": facts(definition) for name, definition in definitions.items()}
    return night.features.model_copy(update={"features": hashed | night.features.features})


def test_a_hashed_feature_with_another_definition_is_rejected(night: Night, champion: Champion) -> None:
    before, current = described(night, colour="hash 4"), described(night, colour="hash 8")
    specs = [
        ModelSpec.of(
            night.spec.config,
            dataset=Dataset(night.interactions, features=one),
        )
        for one in (before, current)
    ]
    old = replace(champion, spec=specs[0], features=before, export=champion.export)
    with pytest.raises(
        InputError, match=r"definition of feature item.colour is hash 8 in this run, but hash 4 in the champion"
    ):
        require_compatible(
            specs[1], champion=old, dataset=Dataset(night.interactions, features=current), optimizer=TableOptimizer(kind="sgd")
        )


def test_a_new_item_feature_is_compatible_and_the_other_projections_are_carried_over(night: Night, champion: Champion) -> None:
    tables = {"item.brand": TableConfig(dim=12), "item.colour": TableConfig(dim=12)}
    old = ModelSpec.of(
        night.spec.config,
        dataset=Dataset(night.interactions, features=night.features),
        tables={"item.brand": tables["item.brand"]},
    )
    current = described(night, colour="hash 4")  # in front of the brand
    spec = ModelSpec.of(night.spec.config, dataset=Dataset(night.interactions, features=current), tables=tables)
    before = replace(champion, spec=old)
    require_compatible(spec, champion=before, dataset=Dataset(night.interactions, features=current), optimizer=ADAGRAD)
    assert "item.colour" not in carried_tables(spec, champion=before)
    brand = torch.rand(8, 12)
    dense = {
        "query.tower.layers.0.weight": torch.rand(8, 24),
        "query.tower.layers.0.bias": torch.rand(8),
        "item.tower.projections.1.weight": brand,
    }
    carried = champion_layers(spec, champion=before, dense=dense)
    assert set(carried) == {
        "query.tower.layers.0.weight",
        "query.tower.layers.0.bias",
        "item.tower.projections.2.weight",
    }
    assert carried["item.tower.projections.2.weight"] is brand


def test_the_vector_of_an_empty_history_is_carried_over_if_the_export_has_it(night: Night, champion: Champion) -> None:
    dense = {"query.tower.layers.0.weight": torch.rand(8, 24), "query.tower.layers.0.bias": torch.rand(8)}
    assert set(champion_layers(night.spec, champion=champion, dense=dense)) == set(dense)  # an export of version 0.1
    dense["query.pooling.start"] = torch.rand(8)
    assert champion_layers(night.spec, champion=champion, dense=dense)["query.pooling.start"] is dense["query.pooling.start"]


def test_a_layer_of_another_shape_is_rejected_with_both_shapes(night: Night, champion: Champion) -> None:
    dense = {"query.tower.layers.0.weight": torch.rand(8, 16), "query.tower.layers.0.bias": torch.rand(8)}
    with pytest.raises(InputError, match=r"layer query.tower.layers.0.weight is \[8, 24\] in this run, but \[8, 16\] in"):
        champion_layers(night.spec, champion=champion, dense=dense)


def test_the_stage_rejects_an_incompatible_champion_before_the_launch(night: Night, champion: Champion, tmp_path: Path) -> None:
    plan = produce(tmp_path / "plan", PlanManifest, fingerprint="plan", build=lambda out: {"world_size": 2, "device": "cpu"})
    plan = plan.model_copy(update={"files": {"plan.json": None}})
    with pytest.raises(InputError, match=r"model.embedding_dim is 16 in this run"):
        train(
            TrainingConfig(),
            model=changed(night, embedding_dim=16),
            loss=LossConfig(),
            dataset=Dataset(night.interactions, features=night.features),
            plan=plan,
            folder=tmp_path / "train",
            on_progress=lambda line: None,
            champion=champion,
        )
    assert not list(tmp_path.glob("train*"))


def test_the_stage_trains_from_scratch_if_the_champion_was_trained_on_held_out_events(
    night: Night, champion: Champion, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan = produce(tmp_path / "plan", PlanManifest, fingerprint="plan", build=lambda out: {"world_size": 2, "device": "cpu"})
    plan = plan.model_copy(update={"files": {"plan.json": None}})
    shorter = pq.read_table(night.folder / "data/log.parquet").filter(pc.field("t") < 7)
    log = write(tmp_path / "log.parquet", **shorter.to_pydict())
    interactions = ingest(tmp_path / "interactions", log, split={"kind": "leave_last_out"})
    # Layers that the champion does not have: a warm start is refused for them, a full training gets as far as the plan.
    with caplog.at_level(logging.INFO, logger="recsys_core"), pytest.raises(FileNotFoundError, match=r"plan\.json"):
        train(
            TrainingConfig(),
            model=changed(night, embedding_dim=16),
            loss=LossConfig(),
            dataset=Dataset(interactions, features=night.features),
            plan=plan,
            folder=tmp_path / "train",
            on_progress=lambda line: None,
            champion=champion,
        )
    (line,) = [line for line in caplog.messages if line.startswith("full training: ")]
    assert "the champion (run first) was trained on 30 of the 60 validation and test events of this run" in line


@pytest.mark.parametrize(("every", "is_warm"), [(7, True), (5, True), (4, False), (1, False)])
def test_every_nth_run_trains_from_scratch(night: Night, champion: Champion, every: int, is_warm: bool) -> None:
    assert champion.train.num_warm_starts == 3
    config = WarmStartConfig(full_retrain_every=every)
    start, reason = choose_start(config, champion=champion, interactions=night.interactions)
    assert (start, reason is None) == ((champion, True) if is_warm else (None, False))
    assert reason is None or f"run 4 since the last one (training.warm_start.full_retrain_every is {every})" in reason


def test_without_setting_or_champion_the_training_starts_from_scratch_without_a_message(
    night: Night, champion: Champion
) -> None:
    assert choose_start(None, champion=champion, interactions=night.interactions) == (None, None)
    assert choose_start(WarmStartConfig(), champion=None, interactions=night.interactions) == (None, None)


def test_a_champion_with_a_missing_or_damaged_stage_is_not_opened(night: Night, champion: Champion) -> None:
    model = champion.export.path("model.json")
    content = model.read_text()
    model.write_text(content + " ")
    assert open_champion(night) is None
    model.write_text(content)
    assert open_champion(night) is not None
    events = night.interactions.path("event_item.npy")
    events.rename(events.with_suffix(".moved"))
    assert open_champion(night) is None
    events.with_suffix(".moved").rename(events)
    (night.folder / "features").rename(night.folder / "elsewhere")
    assert open_champion(night) is None
    (night.folder / "elsewhere").rename(night.folder / "features")
