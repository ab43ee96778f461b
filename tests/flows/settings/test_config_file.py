"""Config files: defaults, overrides, and one readable message for each problem."""

import json
from pathlib import Path

import pytest

from flows.settings.config_file import LoadedConfig, load_config
from flows.settings.pipeline import PipelineConfig
from recsys_core.closed_form.config import EaseVectorsConfig, SpectralVectorsConfig
from recsys_core.errors import InputError
from recsys_core.evaluation.config import FeatureSlice
from recsys_core.ingest.log.config import InteractionsConfig
from recsys_core.ingest.log.split_config import FileSplit
from recsys_core.ingest.vectors.config import EmbeddingsConfig
from recsys_core.launching.config import TorchxLauncher
from recsys_core.models.tables.table_config import TableOptimizer

VALID_CONFIG = "interactions: {paths: log/*.parquet, timestamp_column: ts}\n"


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    path = tmp_path / "nightly.yaml"
    path.write_text(VALID_CONFIG)
    return path


def error_message(config_path: Path, *overrides: str, text: str | None = None) -> str:
    """Return the error of the config file, whose content is replaced by `text` if there is a text."""
    if text is not None:
        config_path.write_text(text)
    with pytest.raises(InputError) as error_info:
        load_config(config_path, overrides)
    return str(error_info.value)


def test_a_missing_setting_has_its_default(config_path: Path) -> None:
    config = load_config(config_path)
    assert config == PipelineConfig(
        workspace=config_path.parent / "workspace",
        interactions=InteractionsConfig(paths=(str(config_path.parent / "log/*.parquet"),), timestamp_column="ts"),
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("training: {batchsize: 3}", "training.batchsize: unknown key; did you mean training.batch_size?"),
        ("batch_size: 3", "batch_size: unknown key; did you mean training.batch_size?"),
        ("registry: {gate: {kind: margin, confidence: 0.9}}", "another kind of registry.gate has this setting; remove it"),
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
def test_each_mistake_is_reported_with_its_key(config_path: Path, text: str, expected: str) -> None:
    assert expected in error_message(config_path, text=VALID_CONFIG + text)


def test_a_key_of_a_split_is_reported_without_the_name_of_the_union_member(config_path: Path) -> None:
    text = "interactions: {paths: x, timestamp_column: ts, split: {kind: time, test_day: 1}}"
    assert "interactions.split.test_day: unknown key; did you mean interactions.split.test_days?" in error_message(
        config_path, text=text
    )


def test_a_launcher_without_kind_or_image_is_rejected(config_path: Path) -> None:
    assert "launcher: set kind to one of local, torchx" in error_message(config_path, "launcher.scheduler=slurm")
    assert "launcher: set kind to one of local, torchx" in error_message(config_path, "launcher={kind: slurm}")
    slurm = "launcher={kind: torchx, scheduler: slurm, args: {partition: gpu}}"
    said = "launcher.kind is torchx, but sharding.cluster.device is auto and processes_per_node is empty"
    assert said in error_message(config_path, slurm)
    config = load_config(config_path, [slurm, "sharding.cluster={device: cuda, num_nodes: 2, processes_per_node: 8}"])
    assert isinstance(config.launcher, TorchxLauncher) and config.launcher.args == {"partition": "gpu"}
    kubernetes = "launcher={kind: torchx, scheduler: kubernetes}"
    assert "scheduler is kubernetes, which starts containers, but image is empty" in error_message(config_path, kubernetes)


def test_a_split_without_a_known_kind_lists_the_kinds(config_path: Path) -> None:
    expected = "interactions.split: set kind to one of time, leave_last_out, files"
    assert expected in error_message(config_path, "interactions.split={test_days: 1}")
    assert expected in error_message(config_path, "interactions.split.kind=weekly")
    kinds = "flat, ivf_flat, ivf_sq8, ivf_pq, opq_pq, pq_fastscan, hnsw"
    assert f"index.served: set kind to one of auto, {kinds}" in error_message(config_path, "index.served=annoy")
    assert f"index.compared.0: set kind to one of {kinds}" in error_message(config_path, "index.compared=[{nlist: 8}]")
    assert "launcher: set kind to one of local, torchx" in error_message(config_path, "launcher.kind=ssh")


def test_all_unknown_keys_are_reported_at_once(config_path: Path) -> None:
    error = error_message(config_path, text=VALID_CONFIG + "training: {batchsize: 3, epoch: 2}\nevaluation: {k: [10]}\n")
    assert [line.split(":")[0].strip() for line in error.splitlines()[1:]] == [
        "training.batchsize", "training.epoch", "evaluation.k",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("interactions: [", "cannot be read as YAML: line 1: expected the node content"),
        ("- a list", "holds list, expected a mapping"),
        ("", "holds NoneType, expected a mapping"),
        ("name: a\nname: b\n" + VALID_CONFIG, 'line 2: found duplicate key "name"'),
        ("name: nightly", "interactions: is missing and has no default"),
        ("!!python/object/apply:os.system [ls]", "line 1: could not determine a constructor for the tag"),
    ],
)
def test_a_file_that_is_not_a_config_is_rejected(config_path: Path, text: str, expected: str) -> None:
    assert expected in error_message(config_path, text=text)


def test_the_message_about_a_missing_file_names_nightjar_init(tmp_path: Path) -> None:
    path = tmp_path / "absent.yaml"
    assert error_message(path) == f"{path}: no such file; `nightjar init {path}` writes one"


def test_overrides_are_yaml_and_reach_any_depth(config_path: Path) -> None:
    config = load_config(
        config_path,
        [
            "training.batch_size=8192",
            "training.dense_optimizer.learning_rate=1e-3",
            "model.query.layers=[128, 64]",
            "tables.item.optimizer={kind: sgd, learning_rate: 0.5}",
            "loss.distillation=null",
            "sharding.tables.item.sharding_types=[row_wise]",
            "interactions.split={kind: time, test_days: 2}",
            "evaluation.max_users=null",
            "name=a=b",
        ],
    )
    assert config.training.batch_size == 8192
    assert config.training.dense_optimizer.learning_rate == 0.001
    assert config.model.query.layers == (128, 64)
    assert config.tables["item"].optimizer == TableOptimizer(kind="sgd", learning_rate=0.5)
    assert config.loss.distillation is None
    assert config.sharding.tables["item"].sharding_types == ("row_wise",)
    assert config.interactions.split.test_days == 2  # type: ignore[union-attr]
    assert config.name == "a=b"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("training.batchsize=3", "training.batchsize: unknown key; did you mean training.batch_size?"),
        ("training", "expected a.b=value"),
        ("training.epochs=[", "--set training.epochs=[: cannot be read as YAML: line 1:"),
        ("name.x=1", "name is the value 'demo', not a group of settings"),
    ],
)
def test_an_invalid_override_is_rejected_like_an_invalid_file(config_path: Path, override: str, expected: str) -> None:
    assert expected in error_message(config_path, override, text=VALID_CONFIG + "name: demo\n")


def test_an_entry_of_a_list_is_reached_by_its_number(config_path: Path) -> None:
    two = VALID_CONFIG + "embeddings: [{paths: a, vector_column: v}, {paths: b, vector_column: v}]\n"
    config_path.write_text(two)
    config = load_config(config_path, ["embeddings.1.pca_dim=8"])
    assert [entry.pca_dim for entry in config.embeddings] == [None, 8]
    expected = "--set embeddings.2.pca_dim=8: embeddings is a list of 2; name an entry by its index, from 0"
    assert expected in error_message(config_path, "embeddings.2.pca_dim=8")
    assert "embeddings is a list of 2" in error_message(config_path, "embeddings.first.pca_dim=8")
    assert "not a group of settings" in error_message(config_path, "embeddings.1=8")


def test_relative_paths_are_relative_to_the_folder_of_the_file(config_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    config = load_config(
        config_path,
        [
            "workspace=../elsewhere",
            "interactions.paths=[log/a.parquet, /data/b.parquet]",
            "interactions.split={kind: files, test_paths: test.parquet}",
            "embeddings={paths: vectors.parquet, vector_column: v}",
        ],
    )
    folder = config_path.parent
    assert config.workspace == folder.parent / "elsewhere"
    assert config.interactions.paths == (str(folder / "log/a.parquet"), "/data/b.parquet")
    assert config.interactions.split == FileSplit(test_paths=(str(folder / "test.parquet"),))
    assert config.embeddings == (EmbeddingsConfig(paths=(str(folder / "vectors.parquet"),), vector_column="v"),)


def test_vectors_from_the_log_are_another_source(config_path: Path) -> None:
    users = "{table: user, paths: u.parquet, id_column: user, vector_column: v}"
    config_path.write_text(
        f"{VALID_CONFIG}model: {{learn_user_embedding: true}}\nembeddings: [{{source: log, dim: 32}}, {users}]\n"
    )
    config = load_config(config_path)
    assert config.embeddings[0] == SpectralVectorsConfig(dim=32) == config.input_config.log_vectors
    assert load_config(
        config_path, ["embeddings.0.method=ease", "embeddings.0.l2=9"]
    ).input_config.log_vectors == EaseVectorsConfig(dim=32, l2=9)
    assert "tables.item.dim is 64, but embeddings.dim is 32; leave tables.item.dim out" in error_message(
        config_path, "tables.item.dim=64", text=f"{VALID_CONFIG}embeddings: {{source: log, dim: 32}}\n"
    )
    assert load_config(config_path, ["tables.item.transfer=residual"]).tables["item"].transfer == "residual"


def test_embeddings_are_one_group_of_settings_or_a_list_of_groups(config_path: Path) -> None:
    text_with_one = VALID_CONFIG + "embeddings: {paths: a.parquet, vector_column: v}\n"
    config_path.write_text(text_with_one)
    config = load_config(config_path, ["embeddings.paths=b.parquet", "embeddings.pca_dim=8"])
    assert [(entry.paths, entry.pca_dim) for entry in config.embeddings] == [((str(config_path.parent / "b.parquet"),), 8)]
    ids = "{paths: map.parquet, from_column: a, to_column: b}"
    config_path.write_text(
        f"{VALID_CONFIG}embeddings: [{{paths: a.parquet, vector_column: v}}, {{paths: c, dimension_prefix: d, id_map: {ids}}}]"
    )
    first, second = load_config(config_path).embeddings
    assert first.table == second.table == "item"
    assert second.id_map is not None and second.id_map.paths == (str(config_path.parent / "map.parquet"),)
    assert load_config(config_path, ["embeddings=null"]).embeddings == ()


@pytest.mark.parametrize(
    ("text", "expected"),
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
        ("{source: log, l2: 8}", "embeddings.l2: unknown key; another kind of embeddings has this setting"),
        (
            "[{source: log}, {paths: a, vector_column: v}]",
            "embeddings has several entries for the table item, and one of them has the source log",
        ),
        (
            "{paths: a, vector_column: v, table: user}",
            "embeddings has vectors of users, but the model has no user table; set",
        ),
    ],
)
def test_a_mistake_in_an_embeddings_entry_is_reported_with_its_key(config_path: Path, text: str, expected: str) -> None:
    assert expected in error_message(config_path, text=f"{VALID_CONFIG}embeddings: {text}")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "index={pq_m: 7, compared_kinds: [ivf_pq]}",
            "index: pq_m of the kind ivf_pq is 7, which does not divide the vector width 64",
        ),
        ("sharding.tables.user.sharding_types=[row_wise]", "sharding.tables.user: the model has no such table; it has"),
        (
            "interactions={paths: x, split: {kind: files, test_paths: y}}",
            "model.history.last_item_feature is true, but interactions has nei",
        ),
        (
            "model.history={length: 0, last_item_feature: false}",
            "the query tower has no feature: set model.learn_user_embedding to true or",
        ),
        ("tables.user.dim=8", "tables.user: the model has no such table; it has ['item']; set model.learn_user_embedding"),
        (
            "tables.item.transfer=frozen",
            "tables.item.transfer is frozen, but embeddings has no vectors of table 'item' (it has",
        ),
    ],
)
def test_contradicting_stages_are_rejected_with_advice(config_path: Path, override: str, expected: str) -> None:
    error = error_message(config_path, override)
    assert expected in error
    assert "set " in error


def test_a_model_of_user_embeddings_needs_stored_users(config_path: Path) -> None:
    error = error_message(config_path, "package.users=none", "model.learn_user_embedding=true")
    assert "package.users is none, but the model reads an embedding of each user" in error
    assert load_config(config_path, ["package={users: none, quantization: none}"]).package.quantization == "fp32"


def test_a_setting_of_an_unknown_table_lists_the_known_tables(config_path: Path) -> None:
    for table in ("item.brand", "item_offset", "item_teacher"):
        for group in ("tables", "sharding.tables"):
            error = error_message(config_path, f"{group}={{{table}: {{}}}}")
            assert f"{group}.{table}: the model has no such table; it has ['item']; name one of them, or declare" in error


UNORDERED = "interactions={paths: x, split: {kind: files, test_paths: y}}"


def test_a_log_without_order_allows_neither_a_last_item_nor_recency_pooling(config_path: Path) -> None:
    no_last = "model.history.last_item_feature=false"
    assert not load_config(config_path, [UNORDERED, no_last, "model.history.include_target=true"]).interactions.is_ordered
    assert "model.history.include_target is for logs without order" in error_message(
        config_path, "model.history.include_target=true"
    )
    error = error_message(config_path, UNORDERED, no_last, "model.history.pooling=recency")
    assert "model.history.pooling is recency, but interactions has neither timestamp_column nor order_column" in error


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("training.validation=null", "training.validation is null; set it, or set model.temperature to a number"),
        ("loss.kind=cosine_contrastive", "loss.kind is cosine_contrastive, which has no temperature; set another kind"),
    ],
)
def test_a_temperature_is_chosen_only_by_validation_and_for_a_loss_that_has_one(
    config_path: Path, override: str, problem: str
) -> None:
    assert load_config(config_path, ["model.temperature=auto"]).model.temperature == "auto"
    assert problem in error_message(config_path, "model.temperature=auto", override)


def test_a_cosine_loss_needs_cosine_similarity(config_path: Path) -> None:
    error = error_message(config_path, "loss.explicit_negatives=4")
    assert "loss.explicit_negatives is 4, but interactions.explicit_negatives is false" in error and "set it to true" in error
    error = error_message(config_path, "loss.kind=cosine_contrastive", "model.similarity=dot")
    assert (
        "loss.kind is cosine_contrastive, whose margin is a cosine, but model.similarity is dot; set model.similarity to cosine"
        in error
    )


@pytest.mark.parametrize(
    ("features", "text"),
    [
        ([], "item.brand is not a declared feature; declare it under features, or set one of the features that you declare"),
        (["features={context: [{name: device}]}"], "or set one of context.device"),
        (
            ["features={items: {paths: p, id_column: id, features: [{name: brand, kind: numeric, standardise: true}]}}"],
            "item.brand is standardised",
        ),
    ],
)
def test_a_slice_needs_a_declared_feature_with_values(features: list[str], text: str, config_path: Path) -> None:
    assert text in error_message(config_path, "evaluation.slices=[{feature: item.brand}]", *features)


@pytest.mark.parametrize(
    ("features", "key", "text"),
    [
        ([], "user.country", "set one of those that you declare under features"),
        (["features={context: [{name: device}, {name: hour, kind: numeric, buckets: 4}]}"], "context.hour", "context.device"),
        (["features={context: [{name: device, hash_rows: 9}]}"], "context.device", "those that you declare"),
        (["features={items: {paths: p, id_column: id, features: [{name: brand}]}}"], "item.brand", "those that you declare"),
    ],
)
def test_popular_items_need_a_feature_with_a_vocabulary_of_single_values(
    features: list[str], key: str, text: str, config_path: Path
) -> None:
    error = error_message(config_path, f"package.popularity_by={key}", *features)
    assert f"package.popularity_by: {key} is not a categorical user or context feature with a vocabulary" in error
    assert text in error


@pytest.mark.parametrize("kind", ["auto", "ivf_pq"])
def test_a_package_without_item_vectors_needs_an_index_with_vectors(kind: str, config_path: Path) -> None:
    error = error_message(config_path, "package.item_vectors=none", f"index.served={kind}")
    assert f"package.item_vectors is none, but an index of kind {kind} may not contain readable vectors; set it" in error
    assert (
        load_config(config_path, overrides=["package.item_vectors=none", "index.served=ivf_sq8"]).package.item_vectors == "none"
    )


def test_a_guarded_feature_is_a_slice_of_the_evaluation(config_path: Path) -> None:
    features = ["features={context: [{name: device}]}", "evaluation.slices=[{feature: context.device, min_users: 40}]"]
    assert (
        "registry.guardrails.features: item.brand is not a feature of evaluation.slices (its features: context.device); add "
        "{feature: item.brand} to evaluation.slices"
    ) in error_message(config_path, "registry.guardrails.features=[item.brand]", *features)
    config = load_config(config_path, overrides=["registry.guardrails.features=[context.device]", *features])
    assert config.guarded_slices == (FeatureSlice(feature="context.device", min_users=40),)
    assert load_config(config_path, overrides=features).guarded_slices == ()


def test_a_fold_is_below_the_number_of_folds(config_path: Path) -> None:
    assert "fold is 2, but num_folds is 2; set fold to at most 1" in error_message(
        config_path, "interactions.split={kind: leave_last_out, num_folds: 2, fold: 2}"
    )


def test_distillation_needs_pretrained_item_vectors(config_path: Path) -> None:
    vectors = "embeddings={paths: a, vector_column: v}"
    distils = "loss.distillation={weight: 0.5}"
    assert load_config(config_path, [vectors, distils]).loss.distillation is not None
    assert (
        "loss.distillation keeps the similarities of the pretrained item vectors, but embeddings has no vectors"
        in error_message(config_path, distils)
    )


def test_the_model_has_tables_of_ids_features_and_offsets(config_path: Path) -> None:
    users, items = (
        f"{side}: {{paths: p, id_column: id, features: [{{name: {name}}}]}}"
        for side, name in (("users", "age"), ("items", "brand"))
    )
    config = load_config(
        config_path,
        [
            f"features={{{users}, {items}, context: [{{name: device}}]}}",
            "embeddings={paths: a, vector_column: v}",
            "model.learn_user_embedding=true",
            "tables={item: {transfer: residual}, item_offset: {init_std: 1}, item.brand: {dim: 8}}",
        ],
    )
    assert config.table_names == {"item", "item_offset", "user", "user.age", "item.brand", "context.device"}


def test_a_table_is_named_as_in_its_catalog_and_the_folder_of_a_table_is_relative_to_the_file(config_path: Path) -> None:
    config_path.write_text(
        "interactions: {paths: [lake.shop.log@v7, ./log, s3://lake/log], format: delta, timestamp_column: ts, "
        "engine: {kind: spark}, split: {kind: files, test_paths: lake.shop.test}}\n"
    )
    interactions = load_config(config_path).interactions
    assert interactions.paths == ("lake.shop.log@v7", str(config_path.parent / "log"), "s3://lake/log")
    assert isinstance(interactions.split, FileSplit) and interactions.split.test_paths == ("lake.shop.test",)


def test_uris_are_unchanged_and_data_root_is_relative_to_the_file(config_path: Path) -> None:
    uris = ["s3://bucket/log/dt=*/*.parquet?region=eu-west-1", "gs://bucket/log", "file:///data/log"]
    config = load_config(config_path, [f"interactions.paths={json.dumps([*uris, 'log'])}", "allowed_data_root=../data"])
    assert config.interactions.paths == (*uris, str(config_path.parent / "log"))
    assert config.allowed_data_root == config_path.parent.parent / "data"
    assert load_config(config_path).allowed_data_root is None


def test_a_loaded_config_has_the_parameters_to_read_it_again(config_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(config_path.parent)
    loaded = LoadedConfig.read(Path(config_path.name), ["training.epochs=2"])
    parameters = loaded.flow_parameters
    assert parameters == {"pipeline": str(config_path), "overrides": ["training.epochs=2"]}
    assert load_config(parameters["pipeline"], parameters["overrides"]) == loaded.config
