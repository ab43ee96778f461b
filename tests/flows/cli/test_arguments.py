"""Options that replace settings."""

from pathlib import Path

import pytest

from flows.cli.arguments import ConfigOptions


@pytest.mark.parametrize(
    "folder_name", ["\u00e4pfel \U0001f600", "a: b # c", 'a "quoted" name', "back\\slash", "1e5", "a\x85b"]
)
def test_an_option_that_replaces_a_setting_may_have_any_character(tmp_path: Path, folder_name: str) -> None:
    config_path = tmp_path / "nightly.yaml"
    config_path.write_text("interactions: {paths: log.parquet, timestamp_column: t}\n")
    options = ConfigOptions(config_path).with_settings({"delivery.recommendations.folder": folder_name, "serve.port": None})
    assert options.read().config.delivery.recommendations.folder == tmp_path / folder_name
    assert len(options.overrides) == 1
