"""The check before the launch that the champion fits the settings of the run, and runs that train from scratch."""

import logging
from contextlib import nullcontext
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
from recsys_core.training.warm.starting_model import Champion, carried_table_names, champion_parameters, require_compatible
from recsys_core.training.warm.warm_start import choose_start
from tests.recsys_core.ingest.interaction_logs import ingest
from tests.recsys_core.ingest.parquet_files import write_parquet
from tests.recsys_core.manifests.committed_stage import commit_stage
from tests.recsys_core.training.consecutive_runs import PreparedRun, prepare_run
from tests.recsys_core.training.small_model import with_optimizer

ADVICE = "set training.warm_start to null for this run, or go back to the old setting"
DEFAULT_OPTIMIZER = TableOptimizer()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> PreparedRun:
    return prepare_run(tmp_path_factory.mktemp("runs") / "run", 1)


@pytest.fixture(scope="module")
def champion(run: PreparedRun) -> Champion:
    """A champion with the same model as `run`; its accumulator files are empty."""

    def write_export(folder: Path) -> dict[str, Any]:
        for table in run.spec.tables:
            (folder / f"state_{table}.npy").touch()
        (folder / "model.json").write_text(run.spec.model_dump_json())
        return {"num_items": 1, "dim": 8, "similarity": "cosine", "num_queries": {}}

    commit_stage(run.folder / "export", ExportManifest, inputs=["export"], build=write_export)
    commit_stage(run.folder / "train", TrainManifest, inputs=["train"], build=lambda folder: TRAIN_FIELDS)
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
    """Return the spec of the model of `run` with other settings."""
    config = TwoTowerConfig.model_validate(run.spec.config.model_dump() | settings)
    return ModelSpec.of(config, dataset=Dataset(run.interactions, features=run.features), tables=tables)


def check_compatible(
    run: PreparedRun, champion: Champion, spec: ModelSpec, *, optimizer: TableOptimizer = DEFAULT_OPTIMIZER
) -> None:
    """Raise InputError if a warm start of `spec` from the champion is impossible."""
    spec = with_optimizer(spec, optimizer)
    require_compatible(spec, champion=champion, dataset=Dataset(run.interactions, features=run.features))


def test_the_same_model_is_compatible_even_with_other_settings_of_the_training(run: PreparedRun, champion: Champion) -> None:
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
def test_the_error_about_another_architecture_names_the_setting_and_both_values(
    run: PreparedRun, champion: Champion, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=f"{message}.*{ADVICE}"):
        check_compatible(run, champion, spec_with(run, **settings))


def test_a_list_feature_with_another_pooling_is_rejected(run: PreparedRun, champion: Champion) -> None:
    tables_with_sum_pooling = {"item.brand": TableConfig(pooling="sum")}
    check_compatible(run, champion, spec_with(run, tables=tables_with_sum_pooling))  # a single value is not pooled
    update_of_forms = {"forms": run.spec.forms | {"item.brand": "list"}}
    champion_of_list_feature = replace(champion, spec=champion.spec.model_copy(update=update_of_forms))
    with pytest.raises(
        InputError, match=rf"tables.item.brand.pooling is sum in this run, but mean in the champion \(run first\).*{ADVICE}"
    ):
        check_compatible(
            run, champion_of_list_feature, spec_with(run, tables=tables_with_sum_pooling).model_copy(update=update_of_forms)
        )


def with_table(spec: ModelSpec, name: str, *, dim: int | None = None, **settings: Any) -> ModelSpec:
    """Return the spec with other settings of one table, and with another width of its rows if `dim` is set."""
    table = spec.tables[name]
    table_settings = TableConfig.model_validate(table.settings.model_dump() | settings)
    table = table.model_copy(update={"settings": table_settings, "dim": dim or table.dim})
    return spec.model_copy(update={"tables": spec.tables | {name: table}})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dim": 16}, "the width of tables.item is 16 in this run, but 8 in the champion"),
        ({"rescale": False}, "tables.item.rescale is False in this run, but True in the champion"),
        ({"init_std": 0.5}, "tables.item.init_std is 0.5 in this run, but 0.02 in the champion"),
        ({"transfer": "full", "dim": 16}, "the width of tables.item is 16 in this run, but 8 in the champion"),
        ({"transfer": "full", "rescale": False, "init_std": 0.5}, None),
    ],
)
def test_frozen_vectors_of_another_width_or_scale_are_rejected(
    run: PreparedRun, champion: Champion, settings: dict[str, Any], message: str | None
) -> None:
    frozen_spec = with_table(run.spec, "item", transfer="frozen")
    frozen_champion = replace(champion, spec=frozen_spec)
    check_compatible(run, frozen_champion, frozen_spec)
    spec = with_table(frozen_spec, "item", **settings)
    with nullcontext() if message is None else pytest.raises(InputError, match=f"{message}.*{ADVICE}"):
        check_compatible(run, frozen_champion, spec)


def test_a_frozen_list_feature_with_another_pooling_is_rejected(run: PreparedRun, champion: Champion) -> None:
    frozen_spec = with_table(run.spec, "item.brand", transfer="frozen")
    frozen_spec = frozen_spec.model_copy(update={"forms": run.spec.forms | {"item.brand": "list"}})
    with pytest.raises(InputError, match=r"tables.item.brand.pooling is sum in this run, but mean in the champion"):
        check_compatible(run, replace(champion, spec=frozen_spec), with_table(frozen_spec, "item.brand", pooling="sum"))


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


def with_hashed_features(run: PreparedRun, **definition_by_name: str) -> FeaturesManifest:
    """Return hashed item features with these definitions, followed by the features of `run`."""
    hashed_features = {f"item.{name}": hashed_feature(definition) for name, definition in definition_by_name.items()}
    return run.features.model_copy(update={"features": hashed_features | run.features.features})


def test_a_hashed_feature_with_another_definition_is_rejected(run: PreparedRun, champion: Champion) -> None:
    old_features, new_features = with_hashed_features(run, colour="hash 4"), with_hashed_features(run, colour="hash 8")
    old_spec, new_spec = (
        ModelSpec.of(run.spec.config, dataset=Dataset(run.interactions, features=features))
        for features in (old_features, new_features)
    )
    old_champion = replace(champion, spec=old_spec, features=old_features)
    with pytest.raises(
        InputError, match=r"definition of feature item.colour is hash 8 in this run, but hash 4 in the champion"
    ):
        require_compatible(
            with_optimizer(new_spec, TableOptimizer(kind="sgd")),
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
    new_features = with_hashed_features(run, colour="hash 4")  # colour comes before brand, so brand becomes projection 2
    spec = ModelSpec.of(run.spec.config, dataset=Dataset(run.interactions, features=new_features), tables=tables)
    old_champion = replace(champion, spec=old_spec)
    require_compatible(spec, champion=old_champion, dataset=Dataset(run.interactions, features=new_features))
    assert "item.colour" not in carried_table_names(spec, champion=old_champion)
    brand_projection = torch.rand(8, 12)
    layer_by_name = {
        "query.tower.layers.0.weight": torch.rand(8, 24),
        "item.tower.projections.1.weight": brand_projection,
    }
    carried_layers = champion_parameters(spec, champion=old_champion, champion_tensors=layer_by_name)
    assert set(carried_layers) == {"query.tower.layers.0.weight", "item.tower.projections.2.weight"}
    assert carried_layers["item.tower.projections.2.weight"] is brand_projection


def test_the_vector_of_an_empty_history_is_carried_over_if_the_export_has_it(run: PreparedRun, champion: Champion) -> None:
    layer_by_name = {"query.tower.layers.0.weight": torch.rand(8, 24)}
    carried_layers = champion_parameters(run.spec, champion=champion, champion_tensors=layer_by_name)
    assert set(carried_layers) == set(layer_by_name)  # as with an export of version 0.1
    layer_by_name["query.pooling.start"] = torch.rand(8)
    carried_layers = champion_parameters(run.spec, champion=champion, champion_tensors=layer_by_name)
    assert carried_layers["query.pooling.start"] is layer_by_name["query.pooling.start"]


def test_the_weight_of_the_popularity_is_carried_over_only_if_the_champion_has_it(run: PreparedRun, champion: Champion) -> None:
    config = TwoTowerConfig.model_validate(run.spec.config.model_dump() | {"popularity": {"kind": "learned"}})
    spec = run.spec.model_copy(update={"config": config})
    dataset = Dataset(run.interactions, features=run.features)
    require_compatible(spec, champion=champion, dataset=dataset)
    layer_by_name = {"query.tower.layers.0.weight": torch.rand(8, 24)}
    assert set(champion_parameters(spec, champion=champion, champion_tensors=layer_by_name)) == set(layer_by_name)
    layer_by_name["query.popularity.weight"] = torch.rand(1)
    carried_layers = champion_parameters(spec, champion=champion, champion_tensors=layer_by_name)
    assert carried_layers["query.popularity.weight"] is layer_by_name["query.popularity.weight"]


def test_a_layer_of_another_shape_is_rejected_with_both_shapes(run: PreparedRun, champion: Champion) -> None:
    layer_by_name = {"query.tower.layers.0.weight": torch.rand(8, 16)}
    with pytest.raises(InputError, match=r"layer query.tower.layers.0.weight is \[8, 24\] in this run, but \[8, 16\] in"):
        champion_parameters(run.spec, champion=champion, champion_tensors=layer_by_name)


def plan_without_file(folder: Path) -> PlanManifest:
    """Return the manifest of a plan stage whose plan.json does not exist."""
    plan = commit_stage(folder, PlanManifest, inputs=["plan"], build=lambda folder: {"world_size": 2, "device": "cpu"})
    return plan.model_copy(update={"files": {"plan.json": None}})


def test_the_stage_rejects_an_incompatible_champion_before_the_launch(
    run: PreparedRun, champion: Champion, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"model.embedding_dim is 16 in this run"):
        train(
            TrainingSetup(spec_with(run, embedding_dim=16), TrainingConfig(), LossConfig()),
            dataset=Dataset(run.interactions, features=run.features),
            plan=plan_without_file(tmp_path / "plan"),
            folder=tmp_path / "train",
            on_progress=lambda line: None,
            champion=champion,
        )
    assert not list(tmp_path.glob("train*"))


def test_the_stage_trains_from_scratch_if_the_champion_was_trained_on_held_out_events(
    run: PreparedRun, champion: Champion, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shorter_log = pq.read_table(run.folder / "data/log.parquet").filter(pc.field("t") < 7)
    log_path = write_parquet(tmp_path / "log.parquet", **shorter_log.to_pydict())
    interactions = ingest(tmp_path / "interactions", log_path, split={"kind": "leave_last_out"})
    # A warm start would be rejected, because the champion has another embedding_dim. A training from scratch gets as far as
    # reading the plan, which does not exist.
    with caplog.at_level(logging.INFO, logger="recsys_core"), pytest.raises(FileNotFoundError, match=r"plan\.json"):
        train(
            TrainingSetup(spec_with(run, embedding_dim=16), TrainingConfig(), LossConfig()),
            dataset=Dataset(interactions, features=run.features),
            plan=plan_without_file(tmp_path / "plan"),
            folder=tmp_path / "train",
            on_progress=lambda line: None,
            champion=champion,
        )
    (message,) = [message for message in caplog.messages if message.startswith("training from scratch: ")]
    # Each of the 30 users has lost the last event, so the champion was trained on their new validation events.
    assert "the champion (run first) was trained on 30 of the 60 validation and test events of this run" in message


@pytest.mark.parametrize(("full_retrain_every", "is_warm"), [(7, True), (5, True), (4, False), (1, False)])
def test_a_training_is_from_scratch_after_a_number_of_warm_starts_in_a_row(
    run: PreparedRun, champion: Champion, full_retrain_every: int, is_warm: bool
) -> None:
    assert champion.train.num_warm_starts == 3
    config = WarmStartConfig(full_retrain_every=full_retrain_every)
    start, reason = choose_start(config, champion=champion, interactions=run.interactions)
    assert (start, reason is None) == ((champion, True) if is_warm else (None, False))
    if reason is not None:
        setting = f"training.warm_start.full_retrain_every is {full_retrain_every}"
        assert f"the champion (run first) is the result of 3 warm starts in a row ({setting})" in reason


def test_without_warm_start_or_champion_the_training_starts_from_scratch(run: PreparedRun, champion: Champion) -> None:
    assert choose_start(None, champion=champion, interactions=run.interactions) == (None, None)
    assert choose_start(WarmStartConfig(), champion=None, interactions=run.interactions) == (None, None)


def test_a_champion_with_a_missing_or_damaged_stage_is_not_opened(run: PreparedRun, champion: Champion) -> None:
    model_path = champion.export.path("model.json")
    model_text = model_path.read_text()
    model_path.write_text(model_text + " ")
    assert open_champion(run) is None
    model_path.write_text(model_text)
    assert open_champion(run) is not None
    events_path = run.interactions.path("event_item.npy")
    events_path.rename(events_path.with_suffix(".moved"))
    assert open_champion(run) is None
    events_path.with_suffix(".moved").rename(events_path)
    (run.folder / "features").rename(run.folder / "elsewhere")
    assert open_champion(run) is None
    (run.folder / "elsewhere").rename(run.folder / "features")
