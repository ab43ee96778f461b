"""A warm start on two gloo ranks: rows, accumulators and layers of one run are carried over to the next run."""

import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

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
from recsys_core.errors import InputError
from recsys_core.manifests import Dataset, FeaturesManifest, InteractionsManifest, require_manifest
from recsys_core.models.spec import ModelSpec
from recsys_core.models.tables.embedding_tables import table_shards
from recsys_core.models.tables.table_config import TableConfig, Transfer, random_norm
from recsys_core.training.checkpoint import restore
from recsys_core.training.config import TrainingConfig
from recsys_core.training.job import CHECKPOINTS_FOLDER, TrainJob, WarmStart
from recsys_core.training.loop import make_loader
from recsys_core.training.model.optimizers import accumulator_shards, make_optimizer
from recsys_core.training.model.sharded_model import initial_model
from recsys_core.training.warm.starting_model import Champion, match_rows_by_value
from recsys_core.training.warm.warm_start import load_champion_accumulators, load_champion_weights, prepare_warm_start
from tests.gloo import cpu_process, run_ranks
from tests.recsys_core.training.consecutive_runs import (
    DIM,
    NUM_RANKS,
    PreparedRun,
    prepare_run,
    train_and_export,
    train_champion,
    train_job,
)

INIT_STD = 0.02
"""Default of `tables.<name>.init_std`."""
VOCABULARY_FILE_BY_TABLE = {"item": "items.parquet", "history_offset": "items.parquet", "user": "users.parquet"}


@pytest.fixture(scope="module")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> PreparedRun:
    return prepare_run(tmp_path_factory.mktemp("runs") / "first", 1)


@pytest.fixture(scope="module")
def champion(first_run: PreparedRun) -> Champion:
    return train_champion(first_run)


@pytest.fixture(scope="module")
def second_run(first_run: PreparedRun, tmp_path_factory: pytest.TempPathFactory) -> PreparedRun:
    """A run that continues the vocabularies of `first_run`. Its folder gets the plan and the work folder of each job."""
    return prepare_run(tmp_path_factory.mktemp("runs") / "second", 2, previous=first_run)


def prepare_start(champion: Champion, run: PreparedRun, folder: Path) -> WarmStart:
    return prepare_warm_start(
        champion,
        spec=run.spec,
        dataset=Dataset(run.interactions, run.embeddings, run.features),
        folder=folder,
    )


def row_values(run: PreparedRun, table: str) -> list[str | None]:
    """Return the id or the feature value of each row of `table`."""
    if table in VOCABULARY_FILE_BY_TABLE:
        ids: list[str | None] = pq.read_table(run.interactions.path(VOCABULARY_FILE_BY_TABLE[table]))["id"].to_pylist()
        return ids
    return pq.read_table(run.features.path(f"{table}.vocabulary.parquet"))["value"].to_pylist()


def untrained_model(job: TrainJob, *, rank: int) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """Return the model and the optimizer as the training loop creates them, before it loads the champion."""
    dataset = job.open_dataset()
    store = EventStore.open(dataset.interactions)
    model = initial_model(job, store=store, dataset=dataset, process=cpu_process(rank))
    return model, make_optimizer(model, spec=job.spec, config=job.training)


def check_warm_start(rank: int, job: TrainJob, expected_folder: Path) -> None:
    """Compare the initial tables and accumulators with <table>.npy and state_<table>.npy in `expected_folder`.

    A row of NaN means that the row starts as in a training from scratch.
    """
    assert job.warm_start is not None
    model, optimizer = untrained_model(job, rank=rank)
    untrained_shards = {
        name: [shard.weight_RD.clone() for shard in table_shards(model.state_dict(), table=name)] for name in job.spec.tables
    }
    load_champion_weights(model, warm_start=job.warm_start)
    load_champion_accumulators(optimizer, spec=job.spec, warm_start=job.warm_start)
    for name in job.spec.tables:
        expected_RD, expected_accumulator_R = (
            torch.from_numpy(np.load(expected_folder / f"{prefix}{name}.npy")) for prefix in ("", "state_")
        )
        shards = table_shards(model.state_dict(), table=name)
        for shard, untrained_RC in zip(shards, untrained_shards[name], strict=True):
            expected_RC = expected_RD[shard.first_row : shard.first_row + len(untrained_RC)]
            torch.testing.assert_close(
                shard.weight_RD, torch.where(expected_RC.isnan(), untrained_RC, expected_RC), rtol=0, atol=0
            )
        (accumulator,) = accumulator_shards(optimizer, spec=job.spec, table=name)
        expected_shard_R = expected_accumulator_R[accumulator.first_row : accumulator.first_row + len(accumulator.values_RC)]
        torch.testing.assert_close(accumulator.values_RC[:, 0], expected_shard_R.nan_to_num(0.0), rtol=0, atol=0)
    head = get_unwrapped_module(model).head
    for name, champion_layer in load_file(job.warm_start.export_folder / "dense.safetensors").items():
        torch.testing.assert_close(head.state_dict()[name], champion_layer, rtol=0, atol=0)


@pytest.mark.parametrize("is_continued", [True, False], ids=["continued vocabulary", "new vocabulary"])
def test_rows_accumulators_and_layers_are_carried_over_by_id(
    first_run: PreparedRun, champion: Champion, tmp_path: Path, caplog: pytest.LogCaptureFixture, is_continued: bool
) -> None:
    next_run = prepare_run(tmp_path / "second", 2, previous=first_run if is_continued else None)
    assert (next_run.interactions.lineage == first_run.interactions.lineage) == is_continued
    with caplog.at_level(logging.INFO, logger="recsys_core"):
        warm_start = prepare_start(champion, next_run, tmp_path / "warm")
    log_text = "\n".join(caplog.messages)
    for table in next_run.spec.tables:
        champion_row_by_value = {value: row for row, value in enumerate(row_values(first_run, table))}
        champion_rows = [champion_row_by_value.get(value) for value in row_values(next_run, table)]
        has_moved_rows = any(champion_row not in (None, row) for row, champion_row in enumerate(champion_rows))
        assert has_moved_rows != is_continued
        for prefix, expected_prefix in (("table_", ""), ("state_", "state_")):
            champion_array = np.load(champion.export.path(f"{prefix}{table}.npy"))
            expected_array = np.full((len(champion_rows), *champion_array.shape[1:]), np.nan, np.float32)
            for row, champion_row in enumerate(champion_rows):
                if champion_row is not None:
                    expected_array[row] = champion_array[champion_row]
            np.save(tmp_path / f"{expected_prefix}{table}.npy", expected_array)
        num_carried_rows, num_rows = sum(champion_row is not None for champion_row in champion_rows), len(champion_rows)
        assert f"warm start from run first: table {table}: {num_carried_rows} of {num_rows} rows from the champion" in log_text
    assert np.load(champion.export.path("state_item.npy")).max() > 0
    new_items = [item for item in row_values(next_run, "item") if item not in row_values(first_run, "item")]
    num_new_with_vector = sum(int(str(item)[1:]) % 3 == 0 for item in new_items)  # as in `prepare_run`
    assert 0 < num_new_with_vector < len(new_items)
    num_new_random = len(new_items) - num_new_with_vector
    assert f"{len(new_items)} new ({num_new_with_vector} from their vector, {num_new_random} random)" in log_text
    job = train_job(next_run).model_copy(update={"warm_start": warm_start})
    run_ranks(check_warm_start, world_size=NUM_RANKS, arguments=(job, tmp_path))


def check_item_rows(rank: int, job: TrainJob, expected_RD: NDArray[np.float32]) -> None:
    """Compare the item table with the expected rows. A row of NaN means any value."""
    model, _ = untrained_model(job, rank=rank)
    if job.warm_start is not None:
        load_champion_weights(model, warm_start=job.warm_start)
    for shard in table_shards(model.state_dict(), table="item"):
        expected_RC = torch.from_numpy(expected_RD[shard.first_row : shard.first_row + len(shard.weight_RD)])
        expected_or_any_RC = torch.where(expected_RC.isnan(), shard.weight_RD, expected_RC)
        torch.testing.assert_close(shard.weight_RD, expected_or_any_RC, atol=1e-6, rtol=1e-4)


def with_random_norm(vector_VD: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the vectors, scaled to the norm of a random row."""
    return vector_VD * (random_norm(INIT_STD, vector_VD.shape[1]) / np.linalg.norm(vector_VD, axis=1, keepdims=True))


def test_a_new_item_starts_with_its_pretrained_vector(
    first_run: PreparedRun, second_run: PreparedRun, champion: Champion, tmp_path: Path
) -> None:
    vector_row_I = np.load(second_run.interactions.path("vector_row.npy"))
    is_new_I = vector_row_I >= 0
    is_new_I[: first_run.spec.num_items] = False
    assert is_new_I.any()
    expected_ID = np.full((len(vector_row_I), DIM), np.nan, np.float32)
    expected_ID[is_new_I] = with_random_norm(np.load(second_run.embeddings.vectors_path("item"))[vector_row_I[is_new_I]])
    job = train_job(second_run).model_copy(update={"warm_start": prepare_start(champion, second_run, tmp_path / "warm")})
    run_ranks(check_item_rows, world_size=NUM_RANKS, arguments=(job, expected_ID))


def with_log_vectors(run: PreparedRun, folder: Path, tables: dict[str, TableConfig] | None = None) -> tuple[Dataset, TrainJob]:
    """Return the dataset and the job of `run` with vectors from the log instead of vectors from files."""
    config = SpectralVectorsConfig(dim=run.spec.tables["item"].dim)
    log_vectors = embed_log(config, interactions=run.interactions, folder=folder)
    dataset = Dataset(run.interactions, features=run.features, log_vectors=log_vectors)
    spec = ModelSpec.of(run.spec.config, dataset=dataset, tables=tables)
    job = train_job(replace(run, spec=spec))
    return dataset, job.model_copy(update={"embeddings_folder": None, "log_vectors_folder": log_vectors.folder})


def expected_item_rows(vector_VD: NDArray[np.float32], dataset: Dataset) -> NDArray[np.float32]:
    """Return the vector of each item with the norm of a random row. The row of an item without a vector is NaN."""
    assert dataset.log_vectors is not None
    vector_row_I = np.load(dataset.log_vectors.vector_row_path)
    expected_ID = np.full((len(vector_row_I), vector_VD.shape[1]), np.nan, np.float32)
    has_vector_I = vector_row_I >= 0
    expected_ID[has_vector_I] = with_random_norm(vector_VD[vector_row_I[has_vector_I]])
    return expected_ID


@pytest.mark.parametrize("transfer", ["full", "frozen"])
def test_items_start_with_their_vectors_from_the_log(first_run: PreparedRun, tmp_path: Path, transfer: Transfer) -> None:
    dataset, job = with_log_vectors(first_run, tmp_path / "log_vectors", {"item": TableConfig(transfer=transfer)})
    assert dataset.log_vectors is not None
    expected_ID = expected_item_rows(np.load(dataset.log_vectors.vectors_path), dataset)
    assert 0 < np.isnan(expected_ID[:, 0]).sum() < len(expected_ID)  # items without events have no vector from the log
    run_ranks(check_item_rows, world_size=NUM_RANKS, arguments=(job, expected_ID))


@pytest.mark.parametrize("transfer", ["full", "frozen"])
def test_vectors_from_the_log_are_rotated_onto_the_champion(
    second_run: PreparedRun, champion: Champion, tmp_path: Path, transfer: Transfer
) -> None:
    dataset, job = with_log_vectors(second_run, tmp_path / "log_vectors", {"item": TableConfig(transfer=transfer)})
    assert dataset.log_vectors is not None
    warm_start = prepare_warm_start(champion, spec=job.spec, dataset=dataset, folder=tmp_path / "warm")
    vector_VD, rotated_VD = np.load(dataset.log_vectors.vectors_path), np.load(tmp_path / "warm/vectors_item.npy")
    np.testing.assert_allclose(rotated_VD @ rotated_VD.T, vector_VD @ vector_VD.T, atol=1e-5)
    expected_ID = expected_item_rows(rotated_VD, dataset)
    champion_ID = np.load(champion.export.path("table_item.npy"))
    num_champion_items = len(champion_ID)  # the vocabulary is continued, so the first rows are the champion's items
    rotated_similarity, unrotated_similarity = (
        np.nansum(item_vector_ID[:num_champion_items] * champion_ID)
        for item_vector_ID in (expected_ID, expected_item_rows(vector_VD, dataset))
    )
    assert rotated_similarity > unrotated_similarity
    if transfer == "full":
        expected_ID[:num_champion_items] = champion_ID
    run_ranks(check_item_rows, world_size=NUM_RANKS, arguments=(job.model_copy(update={"warm_start": warm_start}), expected_ID))


def test_projected_vectors_are_rotated_onto_the_champion(second_run: PreparedRun, champion: Champion, tmp_path: Path) -> None:
    item_table = second_run.embeddings.tables["item"]
    num_projected_vectors = item_table.num_rows - 5  # the last five vectors are from a file without a projection
    projected_table = item_table.model_copy(update={"projected_rows": ((0, num_projected_vectors),)})
    embeddings = second_run.embeddings.model_copy(update={"tables": {"item": projected_table}})
    warm_start = prepare_start(champion, replace(second_run, embeddings=embeddings), tmp_path / "warm")
    vector_VD, rotated_VD = np.load(embeddings.vectors_path("item")), np.load(warm_start.vectors_path_by_table()["item"])
    np.testing.assert_array_equal(rotated_VD[num_projected_vectors:], vector_VD[num_projected_vectors:])
    projected_VD, rotated_projected_VD = vector_VD[:num_projected_vectors], rotated_VD[:num_projected_vectors]
    np.testing.assert_allclose(rotated_projected_VD @ rotated_projected_VD.T, projected_VD @ projected_VD.T, atol=1e-4)
    vector_row_I = EventStore.open(second_run.interactions).vector_rows("item")
    assert vector_row_I is not None
    champion_ID = np.load(champion.export.path("table_item.npy"))
    num_champion_items = len(champion_ID)  # the vocabulary is continued, so the first rows are the champion's items
    is_common_I = (vector_row_I[:num_champion_items] >= 0) & (vector_row_I[:num_champion_items] < num_projected_vectors)
    common_vector_row = vector_row_I[:num_champion_items][is_common_I]
    rotated_similarity, unrotated_similarity = (
        np.sum(vectors[common_vector_row] * champion_ID[is_common_I]) for vectors in (rotated_VD, vector_VD)
    )
    assert rotated_similarity > unrotated_similarity
    is_new_I = vector_row_I >= 0
    is_new_I[:num_champion_items] = False
    expected_ID = np.full((len(vector_row_I), DIM), np.nan, np.float32)
    expected_ID[is_new_I] = with_random_norm(rotated_VD[vector_row_I[is_new_I]])
    assert is_new_I.any()
    job = train_job(second_run).model_copy(update={"warm_start": warm_start})
    run_ranks(check_item_rows, world_size=NUM_RANKS, arguments=(job, expected_ID))


class ItemShard(NamedTuple):
    """Rows of the item table, and their accumulators."""

    rows: torch.Tensor
    accumulators: torch.Tensor


def train_step(job: TrainJob, *, rank: int, checkpoint: Path | None, loads_accumulators: bool = True) -> list[ItemShard]:
    """Train one step from `checkpoint`, or from the champion if `checkpoint` is None. Return the shards of the item table."""
    model, optimizer = untrained_model(job, rank=rank)
    if checkpoint is not None:
        restore(model, optimizer, checkpoint=checkpoint)
    else:
        assert job.warm_start is not None
        load_champion_weights(model, warm_start=job.warm_start)
        if loads_accumulators:
            load_champion_accumulators(optimizer, spec=job.spec, warm_start=job.warm_start)
    interactions = require_manifest(job.interactions_folder, InteractionsManifest)
    assert job.features_folder is not None
    assembler = Assembler(
        user_batch_key=UNPOOLED, features=FeatureStore.open(require_manifest(job.features_folder, FeaturesManifest))
    )
    loader = make_loader(job, store=EventStore.open(interactions), assembler=assembler, process=cpu_process(rank))
    pipeline = TrainPipelineSparseDist(model, optimizer, torch.device("cpu"))
    pipeline.progress(iter([loader.batch(epoch=7, batch_index=0)]))
    return [
        ItemShard(shard.weight_RD.clone(), accumulator.values_RC.clone())
        for shard, accumulator in zip(
            table_shards(model.state_dict(), table="item"),
            accumulator_shards(optimizer, spec=job.spec, table="item"),
            strict=True,
        )
    ]


def compare_next_steps(rank: int, job: TrainJob, export_folder: Path) -> None:
    """Assert that the first step of a warm start equals the next step of a continued training, but not without accumulators."""
    train_and_export(rank, job, export_folder)
    (checkpoint,) = (job.work_folder / CHECKPOINTS_FOLDER).glob("step-*[0-9]")
    warm_start = WarmStart(run_id="first", export_folder=export_folder, prepared_folder=export_folder)
    warm_job = job.model_copy(update={"warm_start": warm_start})
    continued_shards = train_step(job, rank=rank, checkpoint=checkpoint)
    warm_shards = train_step(warm_job, rank=rank, checkpoint=None)
    for expected_shard, warm_shard in zip(continued_shards, warm_shards, strict=True):
        torch.testing.assert_close(warm_shard.rows, expected_shard.rows, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(warm_shard.accumulators, expected_shard.accumulators, rtol=1e-5, atol=1e-9)
    shards_without_accumulators = train_step(warm_job, rank=rank, checkpoint=None, loads_accumulators=False)
    assert any(
        (shard.rows - expected_shard.rows).abs().max() > 1e-3
        for expected_shard, shard in zip(continued_shards, shards_without_accumulators, strict=True)
    )


@pytest.mark.parametrize(
    ("sharding_type", "optimizer_kind", "dim"),
    [("row_wise", "rowwise_adagrad", 8), ("data_parallel", "rowwise_adagrad", 8), ("column_wise", "adagrad", 256)],
)
def test_the_next_step_after_a_warm_start_equals_the_next_step_of_the_champion(
    tmp_path: Path, sharding_type: str, optimizer_kind: str, dim: int
) -> None:
    run = prepare_run(tmp_path / "run", 1, dim=dim, tables={"user": TableConfig(), "item": TableConfig()})
    training = TrainingConfig.model_validate(
        {"epochs": 2, "batch_size": 16, "validation": None, "table_optimizer": {"kind": optimizer_kind}}
    )
    export_folder = tmp_path / "export"
    export_folder.mkdir()
    for name, table in run.spec.tables.items():
        np.save(export_folder / f"rows_{name}.npy", np.arange(table.num_rows))
    job = train_job(run, sharding_type=sharding_type, training=training)
    run_ranks(compare_next_steps, world_size=NUM_RANKS, arguments=(job, export_folder))


@given(
    values=st.lists(st.text(max_size=2) | st.none(), unique=True),
    champion_values=st.lists(st.text(max_size=2) | st.none(), unique=True),
)
def test_each_value_gets_its_row_in_the_vocabulary_of_the_champion(
    values: list[str | None], champion_values: list[str | None]
) -> None:
    columns = [pa.chunked_array([pa.array(column, pa.string())]) for column in (values, champion_values)]
    rows = match_rows_by_value(*columns)
    assert rows.tolist() == [champion_values.index(value) if value in champion_values else -1 for value in values]


def test_integer_ids_match_equal_strings() -> None:
    rows = match_rows_by_value(pa.chunked_array([[7, 5]]), pa.chunked_array([["5", "6"]]))
    assert rows.tolist() == [-1, 0]


def test_frozen_rows_are_never_carried_over(
    first_run: PreparedRun, second_run: PreparedRun, champion: Champion, tmp_path: Path
) -> None:
    frozen_run = prepare_run(tmp_path / "frozen", 2, previous=first_run, tables={"item": TableConfig(transfer="residual")})
    warm_start = prepare_start(champion, frozen_run, tmp_path / "to frozen")
    assert set(warm_start.row_path_by_table()) == {"user", "item.brand", "history_offset"}
    frozen_champion = replace(champion, spec=frozen_run.spec)
    warm_start = prepare_start(frozen_champion, second_run, tmp_path / "from frozen")
    assert set(warm_start.row_path_by_table()) == {"user", "item.brand", "history_offset"}


def test_frozen_vectors_of_another_encoder_are_rejected(first_run: PreparedRun, champion: Champion, tmp_path: Path) -> None:
    tables = {"item": TableConfig(transfer="frozen")}
    frozen_run = prepare_run(tmp_path / "frozen", 2, previous=first_run, tables=tables)
    vector_row_I = np.load(frozen_run.interactions.path("vector_row.npy"))[: first_run.spec.num_items]
    vectors_path = frozen_run.embeddings.vectors_path("item")
    vector_ID = np.where(vector_row_I[:, None] >= 0, np.load(vectors_path)[vector_row_I], 1.0).astype(np.float32)
    champion_export = tmp_path / "champion export"
    champion_export.mkdir()
    for file_name in champion.export.files:
        shutil.copy(champion.export.path(file_name), champion_export / file_name)
    np.save(champion_export / "table_item.npy", INIT_STD * vector_ID)
    export = champion.export.model_copy(update={"folder": champion_export})
    frozen_champion = replace(champion, spec=frozen_run.spec, export=export)
    assert "item" not in prepare_start(frozen_champion, frozen_run, tmp_path / "same").row_path_by_table()
    np.save(champion_export / "table_item.npy", np.random.default_rng(0).normal(size=vector_ID.shape).astype(np.float32))
    message = r"embeddings: 90% of the frozen vectors of table 'item' have at most a cosine of .* champion \(run first\)"
    with pytest.raises(InputError, match=message):
        prepare_start(frozen_champion, frozen_run, tmp_path / "other")
    assert not (tmp_path / "other").exists()
