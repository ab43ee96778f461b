"""Config files: defaults, overrides, relative paths, and files that are not a config."""

import json
from pathlib import Path

import pytest

from flows.settings.config_file import LoadedConfig, load_config
from flows.settings.pipeline import PipelineConfig
from recsys_core.closed_form.config import EaseVectorsConfig, SpectralVectorsConfig
from recsys_core.ingest.log.config import InteractionsConfig
from recsys_core.ingest.log.split_config import FileSplit
from recsys_core.ingest.vectors.config import EmbeddingsConfig
from recsys_core.models.tables.table_config import TableOptimizer
from tests.flows.settings.rejected_config import VALID_CONFIG, error_message


def test_a_missing_setting_has_its_default(config_path: Path) -> None:
    config = load_config(config_path)
    assert config == PipelineConfig(
        workspace=config_path.parent / "workspace",
        interactions=InteractionsConfig(paths=(str(config_path.parent / "log/*.parquet"),), timestamp_column="ts"),
    )


@pytest.mark.parametrize(
    ("text", "expected_message"),
    [
        ("interactions: [", "cannot be read as YAML: line 1: expected the node content"),
        ("- a list", "contains ['a list'], expected settings such as interactions:"),
        ("", "contains no setting, expected settings such as interactions:"),
        ("name: a\nname: b\n" + VALID_CONFIG, 'line 2: found duplicate key "name"'),
        ("name: nightly", "interactions: is missing and has no default"),
        ("!!python/object/apply:os.system [ls]", "line 1: could not determine a constructor for the tag"),
    ],
)
def test_a_file_that_is_not_a_config_is_rejected(config_path: Path, text: str, expected_message: str) -> None:
    assert expected_message in error_message(config_path, text=text)


@pytest.mark.parametrize(
    ("text", "expected_message"),
    [
        (
            "interactions:\n\tpaths: log/",
            r"line 2: found character '\t' that cannot start any token; indent with blanks, not tabs",
        ),
        (
            "interactions:\n  paths: *.parquet",
            "line 2: found undefined alias '.parquet'; put a text with special characters in quotes",
        ),
        ("name: @a", "line 1: found character '@' that cannot start any token; put a text with special characters in quotes"),
        ("name: a: b", "line 1: mapping values are not allowed here; write a blank after the colon of a key, "),
        ("name:a\nworkspace: b", "line 2: mapping values are not allowed here; write a blank after the colon of a key, "),
        (
            "a:\n  b: 1\n c: 2",
            "line 3: expected <block end>, but found '<block mapping start>'; indent the keys of a group equally",
        ),
        ("workspace: 'a\nname: b\n", "found unexpected end of stream; close the quotes, which begin in line 1"),
        ("name: a\nworkspace: [a\nb: c", "line 3: expected ',' or ']', but got ':'; close the bracket, which begins in line 2"),
        ("name: a\nname: b", "remove one of the two keys"),
    ],
)
def test_the_message_about_invalid_yaml_suggests_a_fix(config_path: Path, text: str, expected_message: str) -> None:
    assert expected_message in error_message(config_path, text=text)


def test_a_config_that_is_a_folder_or_not_text_is_rejected(tmp_path: Path) -> None:
    assert error_message(tmp_path) == f"{tmp_path}: is a folder; name a config file, such as {tmp_path}/nightly.yaml"
    path = tmp_path / "latin1.yaml"
    path.write_bytes("name: a\nworkspace: größe".encode("latin-1"))
    assert error_message(path) == f"{path}: line 2: byte 0xf6 is not UTF-8; name a text file, or save the file in UTF-8"


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
    ("override", "expected_message"),
    [
        ("training.batchsize=3", "training.batchsize: unknown key; did you mean training.batch_size?"),
        ("training", "expected a.b=value"),
        ("training.epochs=[", "--set training.epochs=[: cannot be read as YAML: line 1:"),
        ("schedule.cron=*/5 * * * *", "; put a text with special characters in quotes, e.g. --set 'name=\"*\"'"),
        ("name.x=1", "name is the value 'demo', not a group of settings"),
    ],
)
def test_an_invalid_override_is_rejected_like_an_invalid_file(config_path: Path, override: str, expected_message: str) -> None:
    assert expected_message in error_message(config_path, override, text=VALID_CONFIG + "name: demo\n")


def test_an_override_reaches_an_entry_of_a_list_by_its_index(config_path: Path) -> None:
    config_path.write_text(f"{VALID_CONFIG}embeddings: [{{paths: a, vector_column: v}}, {{paths: b, vector_column: v}}]\n")
    config = load_config(config_path, ["embeddings.1.pca_dim=8"])
    assert [entry.pca_dim for entry in config.embeddings] == [None, 8]
    expected_message = "--set embeddings.2.pca_dim=8: embeddings is a list of 2; name an entry by its index, from 0"
    assert expected_message in error_message(config_path, "embeddings.2.pca_dim=8")
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


def test_item_vectors_may_come_from_the_log(config_path: Path) -> None:
    user_vectors = "{table: user, paths: u.parquet, id_column: user, vector_column: v}"
    config_path.write_text(
        f"{VALID_CONFIG}model: {{learn_user_embedding: true}}\nembeddings: [{{source: log, dim: 32}}, {user_vectors}]\n"
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
    config_path.write_text(f"{VALID_CONFIG}embeddings: {{paths: a.parquet, vector_column: v}}\n")
    config = load_config(config_path, ["embeddings.paths=b.parquet", "embeddings.pca_dim=8"])
    assert [(entry.paths, entry.pca_dim) for entry in config.embeddings] == [((str(config_path.parent / "b.parquet"),), 8)]
    entry_with_id_map = "{paths: c, dimension_prefix: d, id_map: {paths: map.parquet, from_column: a, to_column: b}}"
    config_path.write_text(f"{VALID_CONFIG}embeddings: [{{paths: a.parquet, vector_column: v}}, {entry_with_id_map}]")
    first_entry, second_entry = load_config(config_path).embeddings
    assert first_entry.table == second_entry.table == "item"
    assert second_entry.id_map is not None and second_entry.id_map.paths == (str(config_path.parent / "map.parquet"),)
    assert load_config(config_path, ["embeddings=null"]).embeddings == ()


def test_the_model_has_tables_of_ids_features_and_offsets(config_path: Path) -> None:
    user_features, item_features = (
        f"{side}: {{paths: p, id_column: id, features: [{{name: {name}}}]}}"
        for side, name in (("users", "age"), ("items", "brand"))
    )
    config = load_config(
        config_path,
        [
            f"features={{{user_features}, {item_features}, context: [{{name: device}}]}}",
            "embeddings={paths: a, vector_column: v}",
            "model.learn_user_embedding=true",
            "tables={item: {transfer: residual}, item_offset: {init_std: 1}, item.brand: {dim: 8}}",
        ],
    )
    assert config.table_names == {"item", "item_offset", "user", "user.age", "item.brand", "context.device"}


def test_the_name_of_a_catalog_table_is_unchanged_and_a_relative_folder_becomes_absolute(config_path: Path) -> None:
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
    loaded_config = LoadedConfig.read(Path(config_path.name), ["training.epochs=2"])
    parameters = loaded_config.flow_parameters
    assert parameters == {"pipeline": str(config_path), "overrides": ["training.epochs=2"]}
    assert load_config(parameters["pipeline"], parameters["overrides"]) == loaded_config.config
