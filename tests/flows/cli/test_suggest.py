"""`nightjar suggest` with a real log: the table, the settings as YAML, and a file that has them all."""

import json
from pathlib import Path

import pytest
from ruamel.yaml import YAML
from typer.testing import CliRunner

from flows.cli.main import app
from tests.recsys_core.ingest.parquet_files import write


@pytest.fixture
def config(tmp_path: Path) -> Path:
    events = [(user, (user * 7 + step * step) % 50, step) for user in range(40) for step in range(12)]
    users, items, times = (list(column) for column in zip(*events, strict=True))
    log = write(tmp_path / "log.parquet", user_id=users, item_id=items, t=times)
    file = tmp_path / "nightly.yaml"
    file.write_text(f"interactions: {{paths: {log}, timestamp_column: t, split: {{kind: leave_last_out}}}}\n")
    return file


def test_a_file_with_the_suggested_settings_gets_no_more_suggestions(config: Path) -> None:
    answer = CliRunner().invoke(app, ["suggest", str(config), "--json"])
    assert answer.exit_code == 0, answer.output
    suggested = json.loads(answer.stdout.splitlines()[-1])
    assert suggested["facts"]["num_train_events"] == 400 and suggested["changed"]["model.temperature"] == 0.2

    answer = CliRunner().invoke(app, ["suggest", str(config)])
    assert answer.exit_code == 0, answer.output
    assert "a dense log needs a higher temperature" in answer.output and "nightjar tune" in answer.output
    yaml = YAML(typ="safe", pure=True)
    changes = answer.output.partition("for your file\n")[2].partition("\n\n")[0]
    merged = yaml.load(config.read_text()) | yaml.load(changes)
    config.write_text(json.dumps(merged))
    answer = CliRunner().invoke(app, ["suggest", str(config)])
    assert answer.exit_code == 0 and "The file has all suggested settings." in answer.output


def test_settings_that_contradict_the_file_are_named(config: Path) -> None:
    answer = CliRunner().invoke(app, ["suggest", str(config), "--set", "interactions.timestamp_column=nope"])
    assert answer.exit_code == 1 and "nope" in str(answer.exception)
