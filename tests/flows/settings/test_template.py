"""The config file of `nightjar init`: it loads back, explains every setting, and has the important settings."""

import re
from pathlib import Path

import pytest

from flows.settings.config_errors import setting_keys
from flows.settings.config_file import load_config
from flows.settings.pipeline import PipelineConfig
from flows.settings.template import IMPORTANT_SETTINGS, demo_config, starter_config, to_commented_yaml
from recsys_core.ingest.vectors.config import EmbeddingsConfig


@pytest.mark.parametrize("every_setting", [True, False])
def test_the_starter_config_loads_back_to_itself(tmp_path: Path, every_setting: bool) -> None:
    config_path = tmp_path / "nightly.yaml"
    config_path.write_text(to_commented_yaml(starter_config(), every_setting=every_setting))
    assert load_config(config_path) == starter_config().with_absolute_paths(tmp_path)
    assert load_config(config_path, ["embeddings.pca_dim=8"]).embeddings[0].pca_dim == 8
    second_entry = EmbeddingsConfig(paths=("b.parquet",), table="item.brand", dimension_prefix="d")
    config_with_two_entries = starter_config().model_copy(update={"embeddings": (*starter_config().embeddings, second_entry)})
    config_path.write_text(to_commented_yaml(config_with_two_entries, every_setting=every_setting))
    assert load_config(config_path) == config_with_two_entries.with_absolute_paths(tmp_path)


@pytest.mark.parametrize("every_setting", [True, False])
def test_settings_of_tables_and_kinds_that_differ_from_the_default_load_back(tmp_path: Path, every_setting: bool) -> None:
    overrides = [
        "model.history={pooling: self_attention, num_blocks: 1}",
        "model.popularity.kind=learned",
        "tables.item={transfer: residual, optimizer: {kind: sgd, learning_rate: 0.5}}",
        "tuning.ranges={model.temperature: {low: 0.1, high: 0.2}}",
    ]
    config_path = tmp_path / "nightly.yaml"
    config_path.write_text(to_commented_yaml(starter_config(), every_setting=every_setting))
    config = load_config(config_path, overrides)
    config_path.write_text(
        to_commented_yaml(config, note_by_setting={"tables.item.transfer": "a note"}, every_setting=every_setting)
    )
    assert load_config(config_path) == config
    assert "  # a note\n  item: {" in config_path.read_text()


@pytest.mark.parametrize("every_setting", [True, False])
@pytest.mark.parametrize(
    "override",
    [
        "embeddings={source: log, method: ease}",
        "index.compared=[{kind: ivf_pq, pq_m: 16}, ivf_sq8]",
        "delivery.stores=[{kind: lancedb, folder: v}]",
        "interactions.context_columns=[device]",
        "evaluation.metrics=[recall]",
        "interactions.paths=[a.parquet]",
    ],
)
def test_a_list_of_groups_or_of_one_text_loads_back(tmp_path: Path, override: str, every_setting: bool) -> None:
    config_path = tmp_path / "nightly.yaml"
    config_path.write_text(to_commented_yaml(starter_config(), every_setting=every_setting))
    config = load_config(config_path, [override])
    config_path.write_text(to_commented_yaml(config, every_setting=every_setting))
    assert load_config(config_path) == config


def test_the_choices_of_embeddings_name_the_source_and_the_method() -> None:
    text = " ".join(line.partition("#")[2].strip() for line in to_commented_yaml(starter_config()).splitlines())
    assert "(parquet: paths, table, " in text
    assert "| log with method spectral: dim, max_events, memory_gb, user_exponent, " in text


def test_every_setting_is_explained_in_lines_that_fit() -> None:
    lines = to_commented_yaml(starter_config()).splitlines()
    assert max(map(len, lines)) <= 128
    assert [line for line in lines if line.strip() and "#" not in line] == []
    assert any("(cosine | dot)" in line for line in lines)


def test_the_important_settings_exist_and_are_written() -> None:
    assert set(IMPORTANT_SETTINGS) <= set(setting_keys(PipelineConfig))
    text = to_commented_yaml(starter_config(), every_setting=False)
    assert all(f"{name.rpartition('.')[2]}:" in text for name in IMPORTANT_SETTINGS)
    num_written_settings = len(re.findall(r"^[^#\n]*: [^ \n]", text, flags=re.MULTILINE))
    assert len(IMPORTANT_SETTINGS) <= num_written_settings <= len(IMPORTANT_SETTINGS) + 2


def test_the_temperature_is_auto_in_a_new_file_and_a_number_in_the_demo() -> None:
    assert "temperature: auto " in to_commented_yaml(starter_config(), every_setting=False)
    assert "temperature: 0.1 " in to_commented_yaml(demo_config())


@pytest.mark.parametrize("every_setting", [True, False])
def test_a_config_with_a_path_longer_than_a_line_loads_back(tmp_path: Path, every_setting: bool) -> None:
    config = starter_config().with_absolute_paths(tmp_path / ("long" * 40))
    config_path = tmp_path / "nightly.yaml"
    config_path.write_text(to_commented_yaml(config, every_setting=every_setting))
    assert load_config(config_path) == config.with_absolute_paths(tmp_path)
