"""Config limits: every number and text is bounded, and any file gives either a config or one InputError."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from prefect.types.names import BANNED_CHARACTERS

from flows.settings import yaml_loader
from flows.settings.config_errors import setting_keys
from flows.settings.config_file import dump_config, load_config
from flows.settings.pipeline import PipelineConfig
from recsys_core.errors import InputError
from tests.flows.settings.rejected_config import error_message

VALID_CONFIG = {"interactions": {"paths": "log/*.parquet", "timestamp_column": "ts"}}


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    path = tmp_path / "nightly.yaml"
    path.write_text(yaml_loader.dump(VALID_CONFIG))
    return path


def typed_schemas(schema: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the path and the content of each part of a JSON schema that has a plain type."""
    if isinstance(schema, dict):
        if isinstance(schema.get("type"), str):
            yield path, schema
        for name, subschema in schema.items():
            yield from typed_schemas(subschema, f"{path}.{name}") if name not in ("default", "examples") else ()
    if isinstance(schema, list):
        for subschema in schema:
            yield from typed_schemas(subschema, path)


def test_every_number_has_both_bounds_and_every_text_a_length() -> None:
    unbounded_paths = []
    for path, schema in typed_schemas(PipelineConfig.model_json_schema()):
        if schema["type"] in ("integer", "number"):
            has_min = "minimum" in schema or "exclusiveMinimum" in schema
            has_max = "maximum" in schema or "exclusiveMaximum" in schema
            unbounded_paths += [] if has_min and has_max else [path]
        if schema["type"] == "string" and not {"maxLength", "enum", "const"} & set(schema) and schema.get("format") != "path":
            unbounded_paths.append(path)
    assert unbounded_paths == []


@pytest.mark.parametrize(
    ("override", "expected_message"),
    [
        ("training.dense_optimizer.learning_rate=.inf", "should be a finite number"),
        ("training.dense_optimizer.learning_rate=1e308", "less than or equal to 1000"),
        ("training.epochs=1e26", "training.epochs"),
        ("training.batch_size=100000000000000", "less than or equal to 1048576"),
        ("training.seed=18446744073709551616", "less than or equal to 4294967295"),
        ("tuning={seed: 4294967296, ranges: {model.temperature: {low: 0.1, high: 1}}}", "less than or equal to 40000"),
        ("registry.model_name=it's", "registry.model_name: String should match pattern"),
        ('registry.model_name="a\\nb"', "registry.model_name: String should match pattern"),
        ("registry.model_name=two words", "registry.model_name: String should match pattern"),
        ("registry.model_name=" + 300 * "n", "registry.model_name: String should have at most 128 characters"),
        ('registry.experiment="a\\nb"', "registry.experiment: contains the control character U+000A"),
        ("registry.experiment=' a'", "registry.experiment: is ' a', with a blank at its beginning or end"),
        ('name="\\u2028"', "name: contains the control character U+2028"),
        ('workspace="a\\0b"', "workspace: "),
        ("workspace=s3://bucket/nightly", "workspace: is 's3://bucket/nightly', but it must be a path on this machine"),
        ("workspace=http://host/nightly", "workspace: is 'http://host/nightly', but it must be a path on this machine"),
        ("workspace=http://host?nightly", "workspace: is 'http://host?nightly', but it must be a path on this machine"),
        ("workspace=s3:/bucket", "workspace: is 's3:/bucket', but it must be a path on this machine"),
        ("workspace=s3://me:secret@host/a", "workspace: is 's3://me:***@host/a', but it must be a path on this machine"),
        ("workspace=file:///nightly", "workspace: is 'file:///nightly', but it must be a path on this machine"),
        ("workspace=~stranger-here/x", "workspace: is '~stranger-here/x', but the user after ~ does not exist"),
        (
            "interactions.paths=~stranger-here/x",
            "interactions.paths: is '~stranger-here/x', but the user after ~ does not exist",
        ),
        ("interactions.paths=' '", "interactions.paths: is an empty path"),
        ("interactions.user_column=", "interactions.user_column: Input should be a valid string"),
        ("interactions.user_column=''", "interactions.user_column: String should have at least 1 character"),
        ("interactions.user_column=item_id", "interactions: user_column and item_column are both 'item_id'"),
        ("interactions.item_column=ts", "interactions: item_column and timestamp_column are both 'ts'"),
        ("interactions.memory_limit=0GB", "interactions.memory_limit: is 0GB; set a value from 1MB to 1000TB"),
        ("training.epochs=1:30", "training.epochs: Input should be a valid integer"),
        ("training.epochs=yes", "training.epochs: Input should be a valid integer"),
        ("training.epochs=true", "training: epochs is true, which is not a value of this setting"),
        ("model.candidate.layers=[true]", "model.candidate: layers is [true], which is not a value of this setting"),
        ("model.temperature=automatic", "model.temperature: Input should be 'auto', but it is 'automatic'"),
        ("training={epochs: 1, epochs: 2}", 'found duplicate key "epochs"'),
        ("=1", "expected a.b=value"),
        (".=1", "expected a.b=value"),
        ("training..epochs=1", "expected a.b=value"),
        ("a." * 40 + "b=1", "41 nested names"),
    ],
)
def test_an_invalid_value_is_rejected_with_its_key(config_path: Path, override: str, expected_message: str) -> None:
    assert expected_message in error_message(config_path, override)


@pytest.mark.parametrize("character", BANNED_CHARACTERS)
def test_a_name_with_a_character_that_prefect_rejects_is_rejected(config_path: Path, character: str) -> None:
    message = error_message(config_path, f'name="a{character}b"')
    assert f"name: is 'a{character}b', but Prefect allows none of / % & > <" in message and f"remove {character}" in message


def test_numbers_are_read_as_in_yaml_1_2(config_path: Path) -> None:
    config = load_config(
        config_path, ["training.epochs=012", "training.batch_size=0x40", "model.learn_user_embedding=true", "name=1e5x"]
    )
    assert (config.training.epochs, config.training.batch_size) == (12, 64)
    assert config.model.learn_user_embedding and config.name == "1e5x"
    text = (
        "{a: 1:30, b: yes, c: 2026-11-19, d: 0o14, e: .inf, f: ~, g: 1e-3, h: 'x', i: 1_000, j: 1_0.5, k: 0b11, l: =, m: 0x0b}"
    )
    assert yaml_loader.load(text, subject="text") == {
        "a": "1:30", "b": "yes", "c": "2026-11-19", "d": 12, "e": math.inf, "f": None, "g": 0.001, "h": "x",
        "i": 1_000, "j": 10.5, "k": 3, "l": "=", "m": 11,
    }  # fmt: skip
    assert load_config(config_path, ["training.batch_size=1_000"]).training.batch_size == 1_000


def test_a_yaml_alias_repeats_a_group_and_a_merge_key_copies_its_settings(config_path: Path) -> None:
    text = "interactions: {paths: x, timestamp_column: t}\nmodel: {query: &tower {layers: [64, 32]}, candidate: *tower}\n"
    config_path.write_text(text)
    model = load_config(config_path).model
    assert model.query == model.candidate and model.query.layers == (64, 32)
    config_path.write_text(text.replace("*tower}", "{<<: *tower, dropout: 0.5}}"))
    assert (
        load_config(config_path).model.candidate.layers == (64, 32) and load_config(config_path).model.candidate.dropout == 0.5
    )


def test_a_name_with_a_dot_is_written_in_quotes(config_path: Path) -> None:
    brand_feature = "features={items: {paths: p, id_column: id, features: [{name: brand}]}}"
    config = load_config(
        config_path, [brand_feature, 'tables."item.brand".dim=8', 'sharding.tables."item.brand".pooling_factor=2']
    )
    assert config.tables["item.brand"].dim == 8
    assert config.sharding.tables["item.brand"].pooling_factor == 2


@pytest.mark.parametrize(
    ("text", "expected_message"),
    [
        ("a: " + "[" * 3_000, "line 1: maximum depth of data structure exceeded"),
        ("{a: " * 3_000, "line 1: maximum depth of data structure exceeded"),
        ("\n".join(f"key{number}: 1" for number in range(5_000)), "and 4,980 more"),
        ("tables: &a {item: *a}", "tables.item.item: unknown key"),
        ("a: " + "9" * 5_000, "cannot be read as YAML: Exceeds the limit (4300 digits)"),
        ("a: !!python/name:os.system", "cannot be read as YAML: line 1: could not determine a constructor for the tag"),
        ("? [a]\n: 1", "('a',): Keys should be strings"),
    ],
    ids=["brackets", "braces", "many keys", "recursive alias", "many digits", "python tag", "list as key"],
)
def test_a_hostile_config_is_rejected_with_a_short_message(config_path: Path, text: str, expected_message: str) -> None:
    message = error_message(config_path, text=text)
    assert expected_message in message
    assert len(message) < 20_000


HOSTILE_VALUES = [
    "", " ", "~", "~stranger", "/dev/null", "it's", 'a"b', "a\nb", "a\0b", "x" * 5_000, "\ufeff", "1:30", "012", "0o7", "yes",
    "1e5", ".inf", "nan", "-0", "<<", "=", "..", "../..", "s3://", "s3://a:b@c/d", "{}", "\u202e", 2**64, -1, 1e308, 5e-324,
]  # fmt: skip
scalar_strategy = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12) | st.sampled_from(HOSTILE_VALUES)
)
value_strategy = st.recursive(
    scalar_strategy, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)
SETTING_NAMES = sorted({name.replace("*", "item") for name in setting_keys(PipelineConfig)})


def with_setting(name: str, value: Any) -> dict[str, Any]:
    """Return VALID_CONFIG with this value of the setting `name`, a dotted key, or VALID_CONFIG if a parent is no group."""
    config: dict[str, Any] = {"interactions": dict(VALID_CONFIG["interactions"])}
    *parent_keys, last_key = name.split(".")
    group = config
    for key in parent_keys:
        group = group.setdefault(key, {})
        if not isinstance(group, dict):
            return config
    group[last_key] = value
    return config


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(SETTING_NAMES), value_strategy)
@example("tables", {"": {}})
@example("allowed_data_root", [False, "x" * 11_000])
@example("launcher", {"kind": "torchx", "scheduler": "slurm", "env": {"A B": "c"}})
def test_any_value_of_any_setting_gives_a_config_that_reads_back_or_one_message(tmp_path: Path, name: str, value: Any) -> None:
    config_path = tmp_path / "nightly.yaml"
    try:
        text = yaml_loader.dump(with_setting(name, value))
        config_path.write_text(text, encoding="utf-8")
    except UnicodeEncodeError:
        return
    try:
        config = load_config(config_path)
    except InputError as error:
        assert len(str(error)) < 10_000
        return
    dump_config(config, tmp_path / "again.yaml")
    assert load_config(tmp_path / "again.yaml") == config


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(max_size=60) | st.text("{}[]&*!|>'\"%@`#:,-? \n\tab1", max_size=60))
def test_a_random_text_is_rejected_in_one_message(tmp_path: Path, text: str) -> None:
    config_path = tmp_path / "nightly.yaml"
    try:
        config_path.write_text(text, encoding="utf-8")
    except UnicodeEncodeError:
        return
    with pytest.raises(InputError):
        load_config(config_path)
    with pytest.raises(InputError):
        load_config(config_path, [text])


@settings(max_examples=50, deadline=None)
@given(value_strategy)
def test_dumped_values_load_back_unchanged(value: Any) -> None:
    try:
        loaded_value = yaml_loader.load(yaml_loader.dump(value), subject="value")
        assert repr(loaded_value) == repr(value)  # NaN is not equal to itself, and True is equal to 1
    except InputError as error:  # YAML cannot hold an unpaired surrogate
        assert "special characters" in str(error)
