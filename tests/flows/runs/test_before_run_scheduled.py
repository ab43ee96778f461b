"""The choice of a scheduled run after an unfinished run: resume it, or start a new run."""

import logging
import os
import signal
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path

import pytest

from flows.runs.before_run import MAX_STARTS, choose_run_to_resume, find_unfinished_run
from flows.settings.config_file import dump_config, load_config
from flows.settings.pipeline import PipelineConfig
from tasks.runs.context import RunOptions, StageContext
from tasks.runs.run import REDUCED_FILE_NAME, Run
from tasks.runs.run_record import RunRecord, RunState, record_run


@pytest.fixture
def config(tmp_path: Path) -> PipelineConfig:
    config_path = tmp_path / "nightly.yaml"
    config_path.write_text(
        "name: p\nworkspace: .\ninteractions: {paths: log.parquet, timestamp_column: t}\nschedule: {unfinished_run: resume}\n"
    )
    return load_config(config_path, ())


def add_run(
    config: PipelineConfig, run_id: str, state: RunState = "Failed", *, num_starts: int = 1, options: RunOptions | None = None
) -> Run:
    """Write the config and the record of a run that has ended in `state`."""
    run = Run(run_id, workspace=config.workspace)
    dump_config(config, run.config_file)
    record = RunRecord(
        pipeline=config.name,
        options=options or RunOptions(),
        host="h",
        pid=1,
        num_starts=num_starts,
        started=datetime.now(UTC),
        state=state,
        message="the disk is full",
    )
    record.write(run)
    return run


@pytest.mark.parametrize("state", ["Failed", "Interrupted"])
def test_the_newest_run_is_resumed_if_it_failed_or_was_interrupted(
    config: PipelineConfig, state: RunState, caplog: pytest.LogCaptureFixture
) -> None:
    add_run(config, "1")
    add_run(config, "2", state)
    with caplog.at_level(logging.WARNING, "nightjar"):
        assert choose_run_to_resume(config) == "2"
    (warning,) = caplog.messages
    assert warning == (
        f"run 2 is unfinished: {state}, started 0.0 h ago (the disk is full); it is resumed, and stages whose input has "
        "changed are repeated"
    )


@pytest.mark.parametrize("state", ["Promoted", "NotPromoted", "BrokenChampion", "DataRejected"])
def test_an_unfinished_run_is_not_resumed_after_a_later_run_has_ended(config: PipelineConfig, state: RunState) -> None:
    add_run(config, "1")
    add_run(config, "2", state)
    assert choose_run_to_resume(config) is None


def test_experiments_and_runs_of_other_pipelines_and_reduced_runs_are_skipped(
    config: PipelineConfig,
) -> None:
    add_run(config, "1")
    add_run(config, "2", "StoppedEarly")
    add_run(config, "3", "DryRun")
    add_run(config.model_copy(update={"name": "other"}), "4", "Promoted")
    (config.workspace / "runs" / "no run!").mkdir()
    assert choose_run_to_resume(config) == "1"
    (config.workspace / "runs" / "1" / REDUCED_FILE_NAME).write_text("{}")
    assert choose_run_to_resume(config) is None


@pytest.mark.parametrize(
    ("cause", "reason"),
    [
        ("setting", "schedule.unfinished_run is new"),
        ("number of starts", f"started {MAX_STARTS} times"),
        ("options", "options such as --full-retrain"),
        ("changed config", "the config differs from "),
        ("damaged config", "the config differs from "),
    ],
)
def test_a_new_run_starts_and_the_log_has_the_reason(
    config: PipelineConfig, cause: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = add_run(
        config,
        "1",
        num_starts=MAX_STARTS if cause == "number of starts" else 1,
        options=RunOptions(reason="a test", full_retrain=cause == "options"),
    )
    if cause == "setting":
        config = config.model_copy(update={"schedule": config.schedule.model_copy(update={"unfinished_run": "new"})})
    if cause == "changed config":
        config = config.model_copy(update={"training": config.training.model_copy(update={"epochs": 99})})
    if cause == "damaged config":
        run.config_file.write_text("name: [")
    with caplog.at_level(logging.WARNING, "nightjar"):
        assert choose_run_to_resume(config) is None
    (warning,) = (record.getMessage() for record in caplog.records if record.name == "nightjar")
    assert "run 1 is unfinished" in warning and "a new run starts, because" in warning and reason in warning


def test_another_retention_does_not_prevent_a_resume(config: PipelineConfig) -> None:
    add_run(config, "1")
    retention = config.retention.model_copy(update={"keep_full_runs": 3})
    assert choose_run_to_resume(config.model_copy(update={"retention": retention})) == "1"


def _die_in_a_run(run: Run) -> None:
    with run.lock(), record_run(StageContext(run, pipeline="p")):
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_run_counts_as_unfinished_only_after_its_process_has_ended(config: PipelineConfig) -> None:
    run = Run("2", workspace=config.workspace)
    with run.lock(), record_run(StageContext(run, pipeline="p")) as ending:
        assert find_unfinished_run(config.workspace, pipeline_name="p") is None
        ending.set("Promoted", "")
    for num_starts in (2, 3):
        process = get_context("fork").Process(target=_die_in_a_run, args=(run,))
        process.start()
        process.join()
        run_and_record = find_unfinished_run(config.workspace, pipeline_name="p")
        assert run_and_record is not None
        unfinished_run, record = run_and_record
        assert (unfinished_run.run_id, record.state, record.num_starts) == ("2", "Interrupted", num_starts)
