"""A warm start on two gloo ranks: rows, accumulators and layers of one run in the model of the next."""

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.torch import load_file
from torchrec.distributed.model_parallel import DistributedModelParallel, get_unwrapped_module
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.optim.keyed import CombinedOptimizer

from recsys_core.closed_form.config import SpectralVectorsConfig
from recsys_core.closed_form.log_vectors import embed_log
from recsys_core.dataset.batch import Assembler
from recsys_core.dataset.events import EventStore
from recsys_core.dataset.feature_store import UNPOOLED, FeatureStore
from recsys_core.manifests import Dataset, FeaturesManifest, InteractionsManifest, require_manifest
from recsys_core.models.spec import ModelSpec
from recsys_core.models.tables.embedding_tables import table_shards
from recsys_core.models.tables.table_config import TableConfig, Transfer, random_norm
from recsys_core.training.checkpoint import restore
from recsys_core.training.config import TrainingConfig
from recsys_core.training.job import CHECKPOINTS_FOLDER, LOG_VECTORS_FILE, TrainJob, WarmStart
from recsys_core.training.loop import make_loader
from recsys_core.training.optimizers import accumulator_shards, make_optimizer
from recsys_core.training.sharded_model import initial_model
from recsys_core.training.warm.starting_model import Champion, match_rows_by_value
from recsys_core.training.warm.warm_start import load_champion_accumulators, load_champion_weights, prepare_warm_start
from tests.gloo import run_ranks
from tests.recsys_core.training.consecutive_runs import (
    NUM_RANKS,
    PreparedRun,
    prepare_run,
    process,
    train_and_export,
    train_champion,
    train_job,
)

VOCABULARIES = {"item": ("items.parquet", "id"), "user": ("users.parquet", "id")}


@pytest.fixture(scope="module")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> PreparedRun:
    return prepare_run(tmp_path_factory.mktemp("runs") / "first", 1)


@pytest.fixture(scope="module")
def champion(first_run: PreparedRun) -> Champion:
    return train_champion(first_run)


def prepare(champion: Champion, run: PreparedRun, folder: Path) -> WarmStart:
    return prepare_warm_start(
        champion,
        spec=run.spec,
        dataset=Dataset(run.interactions, run.embeddings, run.features),
        folder=folder,
    )


def values(run: PreparedRun, table: str) -> list[str | None]:
    """Return the id or feature value of each row of `table`."""
    if table in VOCABULARIES:
        file, column = VOCABULARIES[table]
        ids: list[str | None] = pq.read_table(run.interactions.path(file))[column].to_pylist()
        return ids
    return pq.read_table(run.features.path(f"{table}.vocabulary.parquet"))["value"].to_pylist()


def untrained_model(job: TrainJob, *, rank: int) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """Return model and optimizer as the training loop makes them, before the champion is loaded."""
    dataset = job.open_dataset()
    store = EventStore.open(dataset.interactions)
    model = initial_model(job, store=store, dataset=dataset, process=process(rank))
    return model, make_optimizer(model, spec=job.spec, config=job.training)


def check_start(rank: int, job: TrainJob, expected: Path) -> None:
    """Compare the tables with <table>.npy and state_<table>.npy in `expected`; NaN: the row starts as in a full training."""
    assert job.warm_start is not None
    model, optimizer = untrained_model(job, rank=rank)
    before = {
        name: [shard.weight_RD.clone() for shard in table_shards(model.state_dict(), table=name)] for name in job.spec.tables
    }
    load_champion_weights(model, warm_start=job.warm_start)
    load_champion_accumulators(optimizer, spec=job.spec, warm_start=job.warm_start)
    for name in job.spec.tables:
        expected_RD, accumulator_R = (torch.from_numpy(np.load(expected / f"{kind}{name}.npy")) for kind in ("", "state_"))
        shards = table_shards(model.state_dict(), table=name)
        for shard, old_RC in zip(shards, before[name], strict=True):
            expected_RC = expected_RD[shard.row : shard.row + len(old_RC)]
            torch.testing.assert_close(shard.weight_RD, torch.where(expected_RC.isnan(), old_RC, expected_RC), rtol=0, atol=0)
        (shard,) = accumulator_shards(optimizer, spec=job.spec, table=name)
        expected_R = accumulator_R[shard.row : shard.row + len(shard.values_RC)]
        torch.testing.assert_close(shard.values_RC[:, 0], expected_R.nan_to_num(0.0), rtol=0, atol=0)
    head = get_unwrapped_module(model).head
    for name, value in load_file(job.warm_start.export_folder / "dense.safetensors").items():
        torch.testing.assert_close(head.state_dict()[name], value, rtol=0, atol=0)


@pytest.mark.parametrize("continued", [True, False], ids=["continued vocabulary", "new vocabulary"])
def test_rows_accumulators_and_layers_are_carried_over_by_id(
    first_run: PreparedRun, champion: Champion, tmp_path: Path, caplog: pytest.LogCaptureFixture, continued: bool
) -> None:
    second_run = prepare_run(tmp_path / "second", 2, after=first_run if continued else None)
    assert (second_run.interactions.lineage == first_run.interactions.lineage) == continued
    with caplog.at_level(logging.INFO, logger="recsys_core"):
        warm = prepare(champion, second_run, tmp_path / "warm")
    log_text = "\n".join(caplog.messages)
    for table in second_run.spec.tables:
        champion_row = {value: row for row, value in enumerate(values(first_run, table))}
        rows = [champion_row.get(value) for value in values(second_run, table)]
        moved = [row for row, old in enumerate(rows) if old is not None and old != row]
        assert bool(moved) != continued
        for kind in ("table_", "state_"):
            old = np.load(champion.export.path(f"{kind}{table}.npy"))
            new = np.full((len(rows), *old.shape[1:]), np.nan, np.float32)
            for row, source in enumerate(rows):
                if source is not None:
                    new[row] = old[source]
            np.save(tmp_path / f"{kind.replace('table_', '')}{table}.npy", new)
        num_carried = sum(row is not None for row in rows)
        assert f"warm start from run first: table {table}: {num_carried} of {len(rows)} rows from the champion" in log_text
    assert np.load(champion.export.path("state_item.npy")).max() > 0
    new_items = [value for value in values(second_run, "item") if value not in values(first_run, "item")]
    num_with_vector = sum(int(str(value)[1:]) % 3 == 0 for value in new_items)
    assert 0 < num_with_vector < len(new_items)
    num_random = len(new_items) - num_with_vector
    assert f"{len(new_items)} new ({num_with_vector} from their vector, {num_random} random)" in log_text
    job = train_job(second_run).model_copy(update={"warm_start": warm})
    run_ranks(check_start, world_size=NUM_RANKS, arguments=(job, tmp_path))


def check_new_items(rank: int, job: TrainJob, rows: list[int], vector_ND: NDArray[np.float32]) -> None:
    assert job.warm_start is not None
    model, _ = untrained_model(job, rank=rank)
    load_champion_weights(model, warm_start=job.warm_start)
    for shard in table_shards(model.state_dict(), table="item"):
        for row, vector_D in zip(rows, torch.from_numpy(vector_ND), strict=True):
            if shard.row <= row < shard.row + len(shard.weight_RD):
                expected_D = vector_D * random_norm(0.02, len(vector_D)) / vector_D.norm()
                torch.testing.assert_close(shard.weight_RD[row - shard.row], expected_D)


def test_a_new_item_starts_with_its_pretrained_vector(first_run: PreparedRun, champion: Champion, tmp_path: Path) -> None:
    second_run = prepare_run(tmp_path / "second", 2, after=first_run)
    vector_row = np.load(second_run.interactions.path("vector_row.npy"))
    rows = [row for row in range(first_run.spec.num_items, second_run.spec.num_items) if vector_row[row] >= 0]
    vectors = np.load(second_run.embeddings.vectors_path("item"))[vector_row[rows]]
    job = train_job(second_run).model_copy(update={"warm_start": prepare(champion, second_run, tmp_path / "warm")})
    run_ranks(check_new_items, world_size=NUM_RANKS, arguments=(job, rows, vectors))


def check_item_rows(rank: int, job: TrainJob, expected_RD: NDArray[np.float32]) -> None:
    """Compare the rows of the item table with expected ones; NaN: any value."""
    model, _ = untrained_model(job, rank=rank)
    if job.warm_start is not None:
        load_champion_weights(model, warm_start=job.warm_start)
    for shard in table_shards(model.state_dict(), table="item"):
        rows_RD = torch.from_numpy(expected_RD[shard.row : shard.row + len(shard.weight_RD)])
        torch.testing.assert_close(
            shard.weight_RD, torch.where(rows_RD.isnan(), shard.weight_RD, rows_RD), atol=1e-6, rtol=1e-4
        )


def with_log_vectors(run: PreparedRun, folder: Path, tables: dict[str, TableConfig] | None = None) -> tuple[Dataset, TrainJob]:
    """Return the dataset and the job of `run` with vectors from the log instead of those from files."""
    config = SpectralVectorsConfig(dim=run.spec.tables["item"].dim)
    log_vectors = embed_log(config, interactions=run.interactions, folder=folder)
    dataset = Dataset(run.interactions, features=run.features, log_vectors=log_vectors)
    spec = ModelSpec.of(run.spec.config, dataset=dataset, tables=tables)
    job = train_job(replace(run, spec=spec))
    return dataset, job.model_copy(update={"embeddings_folder": None, "log_vectors_folder": log_vectors.folder})


def scaled_vectors(vector_VD: NDArray[np.float32], dataset: Dataset) -> NDArray[np.float32]:
    """Return a row per item: its vector at the length of a random row, NaN without a vector."""
    assert dataset.log_vectors is not None
    vector_row_I = np.load(dataset.log_vectors.vector_row_path)
    expected_ID = np.full((len(vector_row_I), vector_VD.shape[1]), np.nan, np.float32)
    has_vector_I = vector_row_I >= 0
    rows_VD = vector_VD[vector_row_I[has_vector_I]]
    expected_ID[has_vector_I] = rows_VD * (random_norm(0.02, rows_VD.shape[1]) / np.linalg.norm(rows_VD, axis=1, keepdims=True))
    return expected_ID


@pytest.mark.parametrize("transfer", ["full", "frozen"])
def test_items_start_with_their_vectors_from_the_log(first_run: PreparedRun, tmp_path: Path, transfer: Transfer) -> None:
    dataset, job = with_log_vectors(first_run, tmp_path / "log_vectors", {"item": TableConfig(transfer=transfer)})
    assert dataset.log_vectors is not None
    expected_ID = scaled_vectors(np.load(dataset.log_vectors.vectors_path), dataset)
    assert 0 < np.isnan(expected_ID[:, 0]).sum() < len(expected_ID)  # an item with a file vector alone has no event
    run_ranks(check_item_rows, world_size=NUM_RANKS, arguments=(job, expected_ID))


@pytest.mark.parametrize("transfer", ["full", "frozen"])
def test_vectors_from_the_log_are_rotated_onto_the_champion(
    first_run: PreparedRun, champion: Champion, tmp_path: Path, transfer: Transfer
) -> None:
    second_run = prepare_run(tmp_path / "second", 2, after=first_run)
    dataset, job = with_log_vectors(second_run, tmp_path / "log_vectors", {"item": TableConfig(transfer=transfer)})
    assert dataset.log_vectors is not None
    warm = prepare_warm_start(champion, spec=job.spec, dataset=dataset, folder=tmp_path / "warm")
    vector_VD, rotated_VD = np.load(dataset.log_vectors.vectors_path), np.load(tmp_path / "warm" / LOG_VECTORS_FILE)
    np.testing.assert_allclose(rotated_VD @ rotated_VD.T, vector_VD @ vector_VD.T, atol=1e-5)
    expected_ID = scaled_vectors(rotated_VD, dataset)
    champion_ID = np.load(champion.export.path("table_item.npy"))
    num_carried = len(champion_ID)  # a continued vocabulary
    similarity = [
        np.nansum(_scaled[:num_carried] * champion_ID) for _scaled in (expected_ID, scaled_vectors(vector_VD, dataset))
    ]
    assert similarity[0] > similarity[1]
    if transfer == "full":
        expected_ID[:num_carried] = champion_ID
    run_ranks(check_item_rows, world_size=NUM_RANKS, arguments=(job.model_copy(update={"warm_start": warm}), expected_ID))


def step(
    job: TrainJob, *, rank: int, checkpoint: Path | None, accumulators: bool = True
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Train one step from `checkpoint`, or from the champion if it is None; return rows and accumulators of the item table."""
    model, optimizer = untrained_model(job, rank=rank)
    if checkpoint is not None:
        restore(model, optimizer, checkpoint=checkpoint)
    else:
        assert job.warm_start is not None
        load_champion_weights(model, warm_start=job.warm_start)
        if accumulators:
            load_champion_accumulators(optimizer, spec=job.spec, warm_start=job.warm_start)
    interactions = require_manifest(job.interactions_folder, InteractionsManifest)
    assert job.features_folder is not None
    assembler = Assembler(
        user_batch_key=UNPOOLED, features=FeatureStore.open(require_manifest(job.features_folder, FeaturesManifest))
    )
    loader = make_loader(job, store=EventStore.open(interactions), assembler=assembler, process=process(rank))
    pipeline = TrainPipelineSparseDist(model, optimizer, torch.device("cpu"))
    pipeline.progress(iter([loader.batch(7, 0)]))
    return [
        (shard.weight_RD.clone(), accumulator.values_RC.clone())
        for shard, accumulator in zip(
            table_shards(model.state_dict(), table="item"),
            accumulator_shards(optimizer, spec=job.spec, table="item"),
            strict=True,
        )
    ]


def check_next_step(rank: int, job: TrainJob, folder: Path) -> None:
    train_and_export(rank, job, folder)
    (checkpoint,) = (job.work_folder / CHECKPOINTS_FOLDER).glob("step-*[0-9]")
    warm = job.model_copy(update={"warm_start": WarmStart(run_id="first", export_folder=folder, prepared_folder=folder)})
    uninterrupted, carried = step(job, rank=rank, checkpoint=checkpoint), step(warm, rank=rank, checkpoint=None)
    for (weight_RC, values_RC), (warm_RC, warm_RS) in zip(uninterrupted, carried, strict=True):
        torch.testing.assert_close(warm_RC, weight_RC, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(warm_RS, values_RC, rtol=1e-5, atol=1e-9)
    without_accumulators = step(warm, rank=rank, checkpoint=None, accumulators=False)
    assert any(
        (weight - other).abs().max() > 1e-3 for (weight, _), (other, _) in zip(uninterrupted, without_accumulators, strict=True)
    )


@pytest.mark.parametrize(
    ("kind", "optimizer", "dim"),
    [("row_wise", "rowwise_adagrad", 8), ("data_parallel", "rowwise_adagrad", 8), ("column_wise", "adagrad", 256)],
)
def test_the_next_step_after_a_warm_start_equals_the_next_step_of_the_champion(
    tmp_path: Path, kind: str, optimizer: str, dim: int
) -> None:
    run = prepare_run(tmp_path / "run", 1, dim=dim, tables={"user": TableConfig(), "item": TableConfig()})
    training = TrainingConfig.model_validate(
        {"epochs": 2, "batch_size": 16, "validation": None, "table_optimizer": {"kind": optimizer}}
    )
    folder = tmp_path / "export"
    folder.mkdir()
    for name, table in run.spec.tables.items():
        np.save(folder / f"rows_{name}.npy", np.arange(table.num_rows))
    run_ranks(check_next_step, world_size=NUM_RANKS, arguments=(train_job(run, kind=kind, training=training), folder))


@given(
    values=st.lists(st.text(max_size=2) | st.none(), unique=True),
    before=st.lists(st.text(max_size=2) | st.none(), unique=True),
)
def test_each_value_gets_its_row_in_the_other_vocabulary(values: list[str | None], before: list[str | None]) -> None:
    rows = match_rows_by_value(*(pa.chunked_array([pa.array(column, pa.string())]) for column in (values, before)))
    assert rows.tolist() == [before.index(value) if value in before else -1 for value in values]


def test_integer_ids_match_equal_strings() -> None:
    rows = match_rows_by_value(pa.chunked_array([[7, 5]]), pa.chunked_array([["5", "6"]]))
    assert rows.tolist() == [-1, 0]


def test_frozen_rows_are_never_carried_over(first_run: PreparedRun, champion: Champion, tmp_path: Path) -> None:
    residual = prepare_run(tmp_path / "residual", 2, after=first_run, tables={"item": TableConfig(transfer="residual")})
    warm = prepare(champion, residual, tmp_path / "warm")
    assert set(warm.row_path_by_table()) == {"user", "item.brand"}
    was_frozen = replace(champion, spec=residual.spec)
    full = prepare_run(tmp_path / "full", 2, after=first_run)
    assert set(prepare(was_frozen, full, tmp_path / "other").row_path_by_table()) == {"user", "item.brand"}
