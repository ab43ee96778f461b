"""The forms of the deployments `promote` and `rollback`, and invalid input, which changes nothing."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flows.champion import promote, rollback
from flows.cli.main import app
from recsys_core.errors import InputError

CONFIG = "interactions: {paths: log.parquet, timestamp_column: timestamp}\n"


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    path = tmp_path / "nightly.yaml"
    path.write_text(CONFIG)
    return path


@pytest.mark.parametrize(
    ("flow", "required_fields"), [(promote, ["pipeline", "version", "reason"]), (rollback, ["pipeline", "reason"])]
)
def test_the_forms_are_short_and_have_titles_descriptions_and_bounds(flow: Any, required_fields: list[str]) -> None:
    schema = flow.parameters.model_dump()
    fields: dict[str, dict[str, Any]] = schema["properties"]
    assert schema["required"] == required_fields
    assert set(fields) == {"pipeline", "version", "reason", "overrides"}
    for name, field in fields.items():
        assert field["title"] != name and field["title"][0].isupper(), name
        assert field["description"].endswith("."), name
        assert field["type"] in ("string", "array", "integer"), f"{name} is shown with tabs instead of one input"
    assert (fields["reason"]["minLength"], fields["reason"]["maxLength"]) == (1, 200)
    assert fields["version"]["minimum"] == (1 if flow is promote else 0)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"reason": " "}, "the reason is empty; describe why the champion changes"),
        ({"reason": "two\nlines"}, r"reason 'two\nlines': a reason is one line of at most 200 characters"),
        ({"reason": "x", "overrides": ("registry.metrics=x",)}, "registry.metrics"),
    ],
)
def test_an_invalid_form_has_the_message_of_the_command_line_and_changes_nothing(
    config_path: Path, parameters: dict[str, Any], message: str
) -> None:
    for flow, version_parameter in ((promote, {"version": 1}), (rollback, {})):
        with pytest.raises(InputError) as form_error:
            flow.fn(str(config_path), **parameters, **version_parameter)
        assert message in str(form_error.value)
        options = [f"--{name}={value}" for name, value in version_parameter.items()]
        options += [f"--set={override}" for override in parameters.get("overrides", ())]
        command_result = CliRunner().invoke(app, [flow.name, str(config_path), f"--reason={parameters['reason']}", *options])
        assert str(command_result.exception) == str(form_error.value)
    assert not list(config_path.parent.glob("workspace/runs")) and not list(config_path.parent.glob("workspace/mlflow.db"))


def test_a_missing_reason_ends_the_command_with_exit_code_2(config_path: Path) -> None:
    assert CliRunner().invoke(app, ["promote", str(config_path), "--version=1"]).exit_code == 2
