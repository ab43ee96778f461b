"""One trial of a tuning: the files that remain after it."""

from pathlib import Path
from typing import Any, cast

import pytest

from recsys_core.errors import StageError
from recsys_core.manifests import TrainManifest
from tasks.tuning.study import RunningTrial
from tasks.tuning.trial import run_trial


def failing_training(**_: Any) -> TrainManifest:
    raise StageError("rank 0 failed")


@pytest.mark.parametrize("linked", ["train", "train.work"])
def test_a_failed_trial_removes_no_file_behind_a_link(tmp_path: Path, linked: str) -> None:
    archive = tmp_path / "archive"
    (archive / "checkpoint").mkdir(parents=True)
    names = ("metrics.jsonl", "values.npy", "checkpoint/weights.bin")
    for name in names:
        (archive / name).write_bytes(b"precious")
    folder = tmp_path / "trial"
    folder.mkdir()
    (folder / linked).symlink_to(archive)
    trial = cast(RunningTrial, None)  # a training that fails reports no epoch
    assert run_trial.fn(trial, failing_training, metric="ndcg@10", folder=folder, label="1").ending == "failed"
    assert all((archive / name).is_file() for name in names)
