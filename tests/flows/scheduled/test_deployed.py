"""The form of the deployed flow: the schema that Prefect shows, and errors before anything runs."""

from pathlib import Path
from typing import Any

import pytest

from flows.scheduled.deployed import deployed_retrain
from flows.settings.config_file import load_config
from recsys_core.errors import InputError
from recsys_core.manifests import STAGES
from tasks.runs.context import RunOptions, StageContext
from tasks.runs.run import Run

CONFIG = "interactions: {paths: log.parquet, timestamp_column: timestamp}\n"


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    path = tmp_path / "nightly.yaml"
    path.write_text(CONFIG)
    return path


def test_the_form_has_few_fields_with_titles_descriptions_defaults_and_dropdowns() -> None:
    schema = deployed_retrain.parameters.model_dump()
    fields: dict[str, dict[str, Any]] = schema["properties"]
    assert schema["required"] == ["pipeline"]
    assert {name: field.get("default") for name, field in fields.items()} == {
        "pipeline": None,
        "reason": "",
        "overrides": [],
        "resume": "",
        "until": "register",
        "full_retrain": False,
        "dry_run": False,
        "promote": "by_gate",
    }
    assert sorted(fields, key=lambda name: fields[name]["position"]) == list(fields)
    for name, field in fields.items():
        assert field["title"] != name and field["title"][0].isupper(), name
        assert field["description"].endswith("."), name
        assert field["type"] in ("string", "array", "boolean"), f"{name} is shown with tabs instead of one input"
    assert fields["until"]["enum"] == list(STAGES)
    assert fields["promote"]["enum"] == ["by_gate", "never", "force"]
    assert (fields["reason"]["maxLength"], fields["overrides"]["maxItems"], fields["pipeline"]["minLength"]) == (200, 100, 1)


@pytest.mark.parametrize(
    "override", ["training.epoch=3", "training.epochs", "training.epochs=-1", "training.epochs=[", "name.first=x", "=1"]
)
def test_an_invalid_override_in_the_form_has_the_message_of_the_command_line(config_path: Path, override: str) -> None:
    with pytest.raises(InputError) as command_error:
        load_config(config_path, [override])
    with pytest.raises(InputError) as form_error:
        deployed_retrain.fn(str(config_path), overrides=("training.epochs=2", override))
    assert str(form_error.value) == str(command_error.value)
    assert form_error.value.exit_code == 2
    assert [path.name for path in config_path.parent.iterdir()] == ["nightly.yaml"]


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"promote": "force"}, "promote is force, but there is no reason; give a reason"),
        ({"promote": "force", "reason": " "}, "promote is force, but there is no reason"),
        ({"promote": "force", "reason": "x", "dry_run": True}, "promote is force, but a dry run registers no version"),
        ({"promote": "force", "reason": "x", "until": "train", "resume": "r"}, "force, but the run ends after train and"),
        ({"reason": "two\nlines"}, r"reason 'two\\nlines': a reason is one line of at most 200 characters"),
        ({"resume": "../x"}, "run id '../x': a run id consists of letters"),
        ({"resume": "20261121-070312-ab12"}, "cannot resume 20261121-070312-ab12: no such run"),
    ],
)
def test_a_form_with_invalid_options_begins_nothing(config_path: Path, parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        deployed_retrain.fn(str(config_path), **parameters)
    assert [path.name for path in config_path.parent.iterdir()] == ["nightly.yaml"]


def test_a_missing_config_file_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"absent\.yaml: no such file"):
        deployed_retrain.fn(str(tmp_path / "absent.yaml"))


def test_an_unknown_promotion_rule_is_rejected_and_a_forced_run_may_name_the_last_stage(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="promote is 'always'; set it to one of by_gate, never, force"):
        RunOptions(promote="always")  # type: ignore[arg-type]
    StageContext(Run("r", workspace=tmp_path), until="register", options=RunOptions(promote="force", reason="x"))
