"""Output of `nightjar run`: the weights that validation has chosen, the query, and a warning of a resume with other options."""

from pathlib import Path

import numpy as np
import pytest

from flows.cli.commands.run import print_results, warn_of_other_options
from flows.runs.results import RunResults
from flows.settings.config_file import LoadedConfig
from flows.settings.template import starter_config
from recsys_core.manifests import RegistrationManifest
from tasks.runs.context import Results, RunOptions
from tasks.runs.run import Run
from tasks.runs.run_record import RunRecord
from tests.recsys_core.evaluation.stage_folders import write_export_stage


@pytest.mark.parametrize(
    ("export_fields", "weight_text"),
    [
        ({}, "spectral block"),
        ({"spectral_block_weight": 0.25}, "weight 0.25\n"),
        ({"spectral_block_weight": 0.0}, "weight 0, so it changes no score; remove model.spectral_block"),
        ({"popularity_weight": 0.1}, "popularity  weight 0.1"),
    ],
)
def test_a_run_shows_the_weights_that_its_export_has_chosen(
    export_fields: dict[str, float], weight_text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vectors = np.eye(4)
    export = write_export_stage(tmp_path / "export", item_vectors=vectors, queries={"test": ([0, 1], vectors[:2])})
    results = RunResults(Run("r", workspace=tmp_path), Results([export.model_copy(update=export_fields)]))
    print_results(results, LoadedConfig(starter_config(), tmp_path / "nightly.yaml"), command_text="nightjar run")
    assert (weight_text in capsys.readouterr().out) == bool(export_fields)  # nothing is printed without a weight


@pytest.mark.parametrize(
    ("alias", "expected_options"), [("champion", "--user ID -k 10"), ("challenger", "--user ID -k 10 --model models:/m/3")]
)
def test_the_query_command_after_a_run_has_the_version_of_the_run(
    alias: str, expected_options: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    registration = RegistrationManifest.model_construct(
        model_name="m", version="3", alias=alias, reasons=("a reason",), alarm=None, metrics={}
    )
    config_path = tmp_path / "nightly.yaml"
    results = RunResults(Run("r", workspace=tmp_path), Results([registration]))
    print_results(results, LoadedConfig(starter_config(), config_path), command_text="nightjar run")
    assert f"query     nightjar query {config_path} {expected_options}\n" in capsys.readouterr().out


def test_a_resume_with_other_options_than_the_last_start_prints_the_options_of_both(capsys: pytest.CaptureFixture[str]) -> None:
    record = RunRecord.model_construct(options=RunOptions(dry_run=True, reason="a test"))
    warn_of_other_options(record, RunOptions())
    warning = " ".join(capsys.readouterr().err.split())
    assert warning == "warning the last start of this run had --reason 'a test' --dry-run; this resume has no options"


def test_a_resume_with_the_options_of_the_last_start_prints_no_warning(capsys: pytest.CaptureFixture[str]) -> None:
    warn_of_other_options(RunRecord.model_construct(options=RunOptions(full_retrain=True)), RunOptions(full_retrain=True))
    assert capsys.readouterr().err == ""
