"""The weights that validation has chosen, as `nightjar run` prints them below the metrics."""

from pathlib import Path

import numpy as np
import pytest

from flows.cli.run import print_results
from flows.runs.results import RunResults
from tasks.runs.context import Results
from tasks.runs.run import Run
from tests.recsys_core.evaluation.stage_folders import export_stage


@pytest.mark.parametrize(
    ("export_fields", "expected_text"),
    [
        ({}, "spectral block"),
        ({"spectral_block_weight": 0.25}, "weight 0.25\n"),
        ({"spectral_block_weight": 0.0}, "weight 0, so it changes no score; remove model.spectral_block"),
        ({"popularity_weight": 0.1}, "popularity  weight 0.1"),
    ],
)
def test_a_run_shows_the_weights_that_its_export_has_chosen(
    export_fields: dict[str, float], expected_text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vectors = np.eye(4)
    export = export_stage(tmp_path / "export", item_vectors=vectors, queries={"test": ([0, 1], vectors[:2])})
    results = RunResults(Run("r", workspace=tmp_path), Results([export.model_copy(update=export_fields)]))
    print_results(results, config_path=tmp_path / "nightly.yaml", command_text="nightjar run")
    assert (expected_text in capsys.readouterr().out) == bool(export_fields)
