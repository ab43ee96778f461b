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
from recsys_core.manifests import Dataset, ExportManifest, FeaturesManifest, IngestedFeature, PlanManifest, TrainManifest
from recsys_core.models.config import TwoTowerConfig
from recsys_core.models.loss.loss_config import LossConfig
from recsys_core.models.spec import ModelSpec
from recsys_core.models.tables.table_config import TableConfig, TableOptimizer
from recsys_core.training.config import TrainingConfig, WarmStartConfig
from recsys_core.training.setup import TrainingSetup
from recsys_core.training.train import train
from recsys_core.training.warm.starting_model import Champion, carried_table_names, champion_layers, require_compatible
from recsys_core.training.warm.warm_start import choose_start
from tests.recsys_core.ingest.interaction_logs import ingest
from tests.recsys_core.ingest.parquet_files import write_parquet
from tests.recsys_core.manifests.committed_stage import commit_stage
from tests.recsys_core.training.consecutive_runs import PreparedRun, prepare_run
from tests.recsys_core.training.small_model import with_optimizer

ADVICE = "set training.warm_start to null for this run, or go back to the old setting"
ADAGRAD = TableOptimizer()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> PreparedRun:
    return prepare_run(tmp_path_factory.mktemp("runs") / "run", 1)


@pytest.fixture(scope="module")
def champion(run: PreparedRun) -> Champion:
    """A champion with the same model; the files of its tables are empty."""

    def build(folder: Path) -> dict[str, Any]:
        for table in run.spec.tables:
            (folder / f"state_{table}.npy").touch()
        (folder / "model.json").write_text(run.spec.model_dump_json())
        return {"num_items": 1, "dim": 8, "similarity": "cosine", "num_queries": {}}

    commit_stage(run.folder / "export", ExportManifest, fingerprint="export", build=build)
    commit_stage(run.folder / "train", TrainManifest, fingerprint="train", build=lambda folder: TRAIN_FIELDS)
    champion = open_champion(run)
    assert champion is not None
    return champion


TRAIN_FIELDS = {
    "world_size": 2,
    "num_steps": 1,
    "num_epochs": 1,
    "num_examples": 1,
    "final_loss": 1.0,
    "samples_per_s": 1.0,
    "num_attempts": 1,
    "best_epoch": None,
    "validation": {},
    "num_warm_starts": 3,
}


def open_champion(run: PreparedRun) -> Champion | None:
    return Champion.open(
        "first", **{f"{name}_folder": run.folder / name for name in ("train", "export", "interactions", "features")}
    )


def spec_with(run: PreparedRun, *, tables: dict[str, TableConfig] | None = None, **settings: Any) -> ModelSpec:
    """Return the spec of the same model with other settings."""
    config = TwoTowerConfig.model_validate(run.spec.config.model_dump() | settings)
    return ModelSpec.of(config, dataset=Dataset(run.interactions, features=run.features), tables=tables)


def check_compatible(run: PreparedRun, champion: Champion, spec: ModelSpec, *, optimizer: TableOptimizer = ADAGRAD) -> None:
    spec = with_optimizer(spec, optimizer)
    require_compatible(spec, champion=champion, dataset=Dataset(run.interactions, features=run.features))


def test_an_equal_model_is_compatible_also_with_other_training_settings(run: PreparedRun, champion: Champion) -> None:
    check_compatible(run, champion, run.spec)
    history = run.spec.config.history.model_dump() | {"length": 9, "item_dropout": 0.5}
    check_compatible(run, champion, spec_with(run, history=history, temperature=0.5, learn_temperature=True))
    check_compatible(run, champion, run.spec, optimizer=TableOptimizer(kind="sgd"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"embedding_dim": 16}, r"model.embedding_dim is 16 in this run, but 8 in the champion \(run first\)"),
        ({"query": {"layers": [16, 8]}}, r"model.query.layers is \[16, 8\] in this run, but \[8\] in the champion"),
        ({"candidate": {"layers": [8]}}, r"model.candidate.layers is \[8\] in this run, but \[\] in the champion"),
        ({"similarity": "dot"}, "model.similarity is dot in this run, but cosine in the champion"),
        (
            {"learn_user_embedding": False},
            r"the input list of the query tower is \['history', 'last_item'\] in this run, but .*'user'\]",
        ),
        ({"tables": {"user": TableConfig(dim=12)}}, "the width of tables.user is 12 in this run, but 8 in the champion"),
    ],
)
def test_another_architecture_is_rejected_with_the_setting_and_both_values(
    run: PreparedRun, champion: Champion, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=f"{message}.*{ADVICE}"):
        check_compatible(run, champion, spec_with(run, **settings))


def test_adagrad_rejects_a_champion_without_accumulators(run: PreparedRun, champion: Champion) -> None:
    export = champion.export.model_copy(update={"files": {}})
    with pytest.raises(
        InputError, match="optimizer of table item is adagrad in this run, but one without Adagrad accumulators"
    ):
        check_compatible(run, replace(champion, export=export), run.spec, optimizer=TableOptimizer(kind="adagrad"))


def test_a_champion_with_another_id_column_is_rejected(run: PreparedRun, champion: Champion) -> None:
    other_interactions = champion.interactions.model_copy(update={"id_columns": ("user_id", "sku")})
    with pytest.raises(InputError, match=r"item_column\) is .*item_id.* in this run, but .*sku"):
        check_compatible(run, replace(champion, interactions=other_interactions), run.spec)


def hashed_feature(definition: str) -> IngestedFeature:
    return IngestedFeature(
        kind="categorical",
        num_rows=5,
        num_values=3,
        num_out_of_vocabulary=0,
        num_missing=0,
        definition=definition,
        is_continued=False,
    )


def with_hashed_features(run: PreparedRun, **definitions: str) -> FeaturesManifest:
    """Return the features of `run` and hashed ones in addition. definitions: definition of each hashed feature by its name."""
    hashed_features = {f"item.{name}": hashed_feature(definition) for name, definition in definitions.items()}
    return run.features.model_copy(update={"features": hashed_features | run.features.features})


def test_a_hashed_feature_with_another_definition_is_rejected(run: PreparedRun, champion: Champion) -> None:
    old_features, new_features = with_hashed_features(run, colour="hash 4"), with_hashed_features(run, colour="hash 8")
    specs = [
        ModelSpec.of(
            run.spec.config,
            dataset=Dataset(run.interactions, features=features),
        )
        for features in (old_features, new_features)
    ]
    old_champion = replace(champion, spec=specs[0], features=old_features, export=champion.export)
    with pytest.raises(
        InputError, match=r"definition of feature item.colour is hash 8 in this run, but hash 4 in the champion"
    ):
        require_compatible(
            with_optimizer(specs[1], TableOptimizer(kind="sgd")),
            champion=old_champion,
            dataset=Dataset(run.interactions, features=new_features),
        )


def test_a_new_item_feature_is_compatible_and_the_other_projections_are_carried_over(
    run: PreparedRun, champion: Champion
) -> None:
    tables = {"item.brand": TableConfig(dim=12), "item.colour": TableConfig(dim=12)}
    old_spec = ModelSpec.of(
        run.spec.config,
        dataset=Dataset(run.interactions, features=run.features),
        tables={"item.brand": tables["item.brand"]},
    )
    new_features = with_hashed_features(run, colour="hash 4")  # the new feature comes before the brand
    spec = ModelSpec.of(run.spec.config, dataset=Dataset(run.interactions, features=new_features), tables=tables)
    old_champion = replace(champion, spec=old_spec)
    require_compatible(spec, champion=old_champion, dataset=Dataset(run.interactions, features=new_features))
    assert "item.colour" not in carried_table_names(spec, champion=old_champion)
    brand_projection = torch.rand(8, 12)
    layer_by_name = {
        "query.tower.layers.0.weight": torch.rand(8, 24),
        "item.tower.projections.1.weight": brand_projection,
    }
    carried_layers = champion_layers(spec, champion=old_champion, champion_tensors=layer_by_name)
    assert set(carried_layers) == {"query.tower.layers.0.weight", "item.tower.projections.2.weight"}
    assert carried_layers["item.tower.projections.2.weight"] is brand_projection


def test_the_vector_of_an_empty_history_is_carried_over_if_the_export_has_it(run: PreparedRun, champion: Champion) -> None:
    layer_by_name = {"query.tower.layers.0.weight": torch.rand(8, 24)}
    assert set(champion_layers(run.spec, champion=champion, champion_tensors=layer_by_name)) == set(
        layer_by_name
    )  # an export of version 0.1
    layer_by_name["query.pooling.start"] = torch.rand(8)
    assert (
        champion_layers(run.spec, champion=champion, champion_tensors=layer_by_name)["query.pooling.start"]
        is layer_by_name["query.pooling.start"]
    )


def test_the_weight_of_the_popularity_starts_from_0_if_the_champion_has_none(run: PreparedRun, champion: Champion) -> None:
    config = TwoTowerConfig.model_validate(run.spec.config.model_dump() | {"popularity": {"kind": "learned"}})
    spec = run.spec.model_copy(update={"config": config})
    dataset = Dataset(run.interactions, features=run.features)
    require_compatible(spec, champion=champion, dataset=dataset)
    layer_by_name = {"query.tower.layers.0.weight": torch.rand(8, 24)}
    assert set(champion_layers(spec, champion=champion, champion_tensors=layer_by_name)) == set(layer_by_name)
    layer_by_name["query.popularity.weight"] = torch.rand(1)
    carried = champion_layers(spec, champion=champion, champion_tensors=layer_by_name)
    assert carried["query.popularity.weight"] is layer_by_name["query.popularity.weight"]


def test_a_layer_of_another_shape_is_rejected_with_both_shapes(run: PreparedRun, champion: Champion) -> None:
    layer_by_name = {"query.tower.layers.0.weight": torch.rand(8, 16)}
    with pytest.raises(InputError, match=r"layer query.tower.layers.0.weight is \[8, 24\] in this run, but \[8, 16\] in"):
        champion_layers(run.spec, champion=champion, champion_tensors=layer_by_name)


def test_the_stage_rejects_an_incompatible_champion_before_the_launch(
    run: PreparedRun, champion: Champion, tmp_path: Path
) -> None:
    plan = commit_stage(
        tmp_path / "plan", PlanManifest, fingerprint="plan", build=lambda folder: {"world_size": 2, "device": "cpu"}
    )
    plan = plan.model_copy(update={"files": {"plan.json": None}})
    with pytest.raises(InputError, match=r"model.embedding_dim is 16 in this run"):
        train(
            TrainingSetup(spec_with(run, embedding_dim=16), TrainingConfig(), LossConfig()),
            dataset=Dataset(run.interactions, features=run.features),
            plan=plan,
            folder=tmp_path / "train",
            on_progress=lambda line: None,
            champion=champion,
        )
    assert not list(tmp_path.glob("train*"))


def test_the_stage_trains_from_scratch_if_the_champion_was_trained_on_held_out_events(
    run: PreparedRun, champion: Champion, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan = commit_stage(
        tmp_path / "plan", PlanManifest, fingerprint="plan", build=lambda folder: {"world_size": 2, "device": "cpu"}
    )
    plan = plan.model_copy(update={"files": {"plan.json": None}})
    shorter_log = pq.read_table(run.folder / "data/log.parquet").filter(pc.field("t") < 7)
    log = write_parquet(tmp_path / "log.parquet", **shorter_log.to_pydict())
    interactions = ingest(tmp_path / "interactions", log, split={"kind": "leave_last_out"})
    # The champion's layers do not fit this model. A warm start would be rejected for that reason, but a training from scratch
    # gets as far as reading the plan, which does not exist.
    with caplog.at_level(logging.INFO, logger="recsys_core"), pytest.raises(FileNotFoundError, match=r"plan\.json"):
        train(
            TrainingSetup(spec_with(run, embedding_dim=16), TrainingConfig(), LossConfig()),
            dataset=Dataset(interactions, features=run.features),
            plan=plan,
            folder=tmp_path / "train",
            on_progress=lambda line: None,
            champion=champion,
        )
    (line,) = [line for line in caplog.messages if line.startswith("full training: ")]
    assert "the champion (run first) was trained on 30 of the 60 validation and test events of this run" in line


@pytest.mark.parametrize(("every", "is_warm"), [(7, True), (5, True), (4, False), (1, False)])
def test_every_nth_run_trains_from_scratch(run: PreparedRun, champion: Champion, every: int, is_warm: bool) -> None:
    assert champion.train.num_warm_starts == 3
    config = WarmStartConfig(full_retrain_every=every)
    start, reason = choose_start(config, champion=champion, interactions=run.interactions)
    assert (start, reason is None) == ((champion, True) if is_warm else (None, False))
    assert reason is None or f"run 4 since the last full training (training.warm_start.full_retrain_every is {every})" in reason


def test_without_setting_or_champion_the_training_starts_from_scratch_without_a_message(
    run: PreparedRun, champion: Champion
) -> None:
    assert choose_start(None, champion=champion, interactions=run.interactions) == (None, None)
    assert choose_start(WarmStartConfig(), champion=None, interactions=run.interactions) == (None, None)


def test_a_champion_with_a_missing_or_damaged_stage_is_not_opened(run: PreparedRun, champion: Champion) -> None:
    model = champion.export.path("model.json")
    content = model.read_text()
    model.write_text(content + " ")
    assert open_champion(run) is None
    model.write_text(content)
    assert open_champion(run) is not None
    events = run.interactions.path("event_item.npy")
    events.rename(events.with_suffix(".moved"))
    assert open_champion(run) is None
    events.with_suffix(".moved").rename(events)
    (run.folder / "features").rename(run.folder / "elsewhere")
    assert open_champion(run) is None
    (run.folder / "elsewhere").rename(run.folder / "features")
