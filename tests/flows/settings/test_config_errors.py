"""Each mistake in a config is one readable message with the key as the user wrote it."""

from pathlib import Path

import pytest

from flows.settings.config_file import load_config
from recsys_core.launching.config import TorchxLauncher
from tests.flows.settings.rejected_config import VALID_CONFIG, error_message


@pytest.mark.parametrize(
    ("text", "expected_message"),
    [
        ("training: {batchsize: 3}", "training.batchsize: unknown key; did you mean training.batch_size?"),
        ("batch_size: 3", "batch_size: unknown key; did you mean training.batch_size?"),
        (
            "registry: {gate: {kind: margin, confidence: 0.9}}",
            "only another kind of registry.gate has this setting; remove the setting",
        ),
        ("training:", "training: expected a group of settings, but it is null; write its settings below it, or delete the key"),
        ("evaluation: {ks: 5}", "evaluation.ks: expected a list, but it is 5; write its entries in brackets"),
        ("tables: 3", "tables: expected a group of settings, but it is 3; write its settings below it, or delete the key"),
        ("delivery: {stores: {kind: lancedb}}", "delivery.stores: expected a list, but it is {'kind': 'lancedb'}; "),
        ("trainin: {epochs: 3}", "trainin: unknown key; did you mean training?"),
        (
            "sharding: {tables: {item: {sharding_type: [row_wise]}}}",
            "sharding.tables.item.sharding_type: unknown key; did you mean sharding.tables.item.sharding_types?",
        ),
        (
            "embeddings: {checksums: pages}",
            "embeddings.checksums: this setting no longer exists; delete it. Page checksums are always verified, and "
            "<file>.sha256 is not read",
        ),
        (
            "package: {zzz: 1}",
            "package.zzz: unknown key; the known keys are exports, item_vectors, popularity_by",
        ),
        ("training: {epochs: 0}", "training.epochs: Input should be greater than or equal to 1, but it is 0"),
        ("model: {similarity: l2}", "model.similarity: Input should be 'cosine' or 'dot', but it is 'l2'"),
        ("model: {query: {layers: [64, x]}}", "model.query.layers.1: Input should be a valid integer"),
        ("model: {max_history: 3}", "model.max_history: unknown key; did you mean model.history?"),
        ("model: {history: {lenght: 3}}", "model.history.lenght: unknown key; did you mean model.history.length?"),
        ("model: {history: {length: 0}}", "model.history: last_item_feature is true, but length is 0; set length"),
        ("loss: {uniform_negatives: 0}", "loss.uniform_negatives: unknown key; did you mean loss.num_negatives?"),
        ("loss: {kind: bce, num_negatives: 0}", "loss: loss.kind is bce, which needs negatives"),
        ("tables: {item: {dims: 8}}", "tables.item.dims: unknown key; did you mean tables.item.dim?"),
        ("tables: {item.brand: {dims: 8}}", "tables.item.brand.dims: unknown key; did you mean tables.item.brand.dim?"),
        ("tables: {item: {dim: 6}}", "tables.item.dim: Input should be a multiple of 4, but it is 6"),
        ("tables: {item: {transfer: gradual}}", "tables.item: transfer is gradual, but unfreeze is empty"),
        ("tables: {item: {lookup: pooled}}", "tables.item: lookup is only for the tables ['user']; leave it out"),
        ("registry: {model_name: a/b}", "registry.model_name: String should match pattern"),
    ],
)
def test_each_mistake_is_reported_with_its_key(config_path: Path, text: str, expected_message: str) -> None:
    assert expected_message in error_message(config_path, text=VALID_CONFIG + text)


def test_a_key_of_a_split_is_reported_without_the_name_of_the_union_member(config_path: Path) -> None:
    text = "interactions: {paths: x, timestamp_column: ts, split: {kind: time, test_day: 1}}"
    assert "interactions.split.test_day: unknown key; did you mean interactions.split.test_days?" in error_message(
        config_path, text=text
    )


def test_a_launcher_without_kind_or_image_is_rejected(config_path: Path) -> None:
    assert "launcher: set kind to one of local, torchx" in error_message(config_path, "launcher.scheduler=slurm")
    assert "launcher: set kind to one of local, torchx" in error_message(config_path, "launcher={kind: slurm}")
    slurm_override = "launcher={kind: torchx, scheduler: slurm, args: {partition: gpu}}"
    expected_message = "launcher.kind is torchx, but sharding.cluster.device is auto and processes_per_node is empty"
    assert expected_message in error_message(config_path, slurm_override)
    config = load_config(config_path, [slurm_override, "sharding.cluster={device: cuda, num_nodes: 2, processes_per_node: 8}"])
    assert isinstance(config.launcher, TorchxLauncher) and config.launcher.args == {"partition": "gpu"}
    kubernetes_override = "launcher={kind: torchx, scheduler: kubernetes}"
    assert "scheduler is kubernetes, which starts containers, but image is empty" in error_message(
        config_path, kubernetes_override
    )


def test_a_group_without_a_known_kind_lists_the_kinds(config_path: Path) -> None:
    expected_message = "interactions.split: set kind to one of time, leave_last_out, files"
    assert expected_message in error_message(config_path, "interactions.split={test_days: 1}")
    assert expected_message in error_message(config_path, "interactions.split.kind=weekly")
    kinds = "flat, ivf_flat, ivf_sq8, ivf_pq, opq_pq, pq_fastscan, hnsw"
    assert f"index.served: set kind to one of auto, {kinds}" in error_message(config_path, "index.served=annoy")
    assert f"index.compared.0: set kind to one of {kinds}" in error_message(config_path, "index.compared=[{nlist: 8}]")


def test_all_unknown_keys_are_reported_at_once(config_path: Path) -> None:
    message = error_message(config_path, text=VALID_CONFIG + "training: {batchsize: 3, epoch: 2}\nevaluation: {k: [10]}\n")
    assert [line.split(":")[0].strip() for line in message.splitlines()[1:]] == [
        "training.batchsize", "training.epoch", "evaluation.k",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("embeddings_text", "expected_message"),
    [
        ("{paths: a, vector_colum: v}", "embeddings.vector_colum: unknown key; did you mean embeddings.vector_column?"),
        ("[{paths: a, vector_colum: v}]", "embeddings.0.vector_colum: unknown key; did you mean embeddings.vector_column?"),
        ("{paths: a}", "embeddings: set exactly one of vector_column (list column) and dimension_prefix"),
        ("[{paths: a, vector_column: v}, {paths: a}]", "embeddings.1: set exactly one of vector_column"),
        ("{paths: a, vector_column: v, table: ../x}", "embeddings.table: String should match pattern"),
        ("{source: csv}", "embeddings: set source to one of parquet, log"),
        ("{source: log, method: nmf}", "embeddings: set method to one of spectral, ease, ials"),
        ("[{source: log, dim: 6}]", "embeddings.0.dim: Input should be a multiple of 4"),
        ("{source: log, dmi: 8}", "embeddings.dmi: unknown key; did you mean embeddings.dim?"),
        ("{source: log, l2: 8}", "embeddings.l2: unknown key; only another kind of embeddings has this setting"),
        (
            "[{source: log}, {paths: a, vector_column: v}]",
            "embeddings has several entries for the table item, and one of them has `source: log`",
        ),
        (
            "{paths: a, vector_column: v, table: user}",
            "embeddings has vectors of users, but the model has no user table; set",
        ),
    ],
)
def test_a_mistake_in_an_embeddings_entry_is_reported_with_its_key(
    config_path: Path, embeddings_text: str, expected_message: str
) -> None:
    assert expected_message in error_message(config_path, text=f"{VALID_CONFIG}embeddings: {embeddings_text}")


def test_a_fold_is_below_the_number_of_folds(config_path: Path) -> None:
    assert "fold is 2, but num_folds is 2; set fold to at most 1" in error_message(
        config_path, "interactions.split={kind: leave_last_out, num_folds: 2, fold: 2}"
    )
