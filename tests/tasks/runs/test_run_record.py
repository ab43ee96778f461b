"""Records of runs: their state after success, an exception, a signal or a kill."""

import multiprocessing
import os
import signal
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from recsys_core.errors import StageError
from recsys_core.manifests import DataReportManifest, RegistrationManifest
from tasks.runs.context import RunOptions, StageContext
from tasks.runs.run import Run
from tasks.runs.run_record import RunRecord, record_run
from tests.recsys_core.manifests.committed_stage import commit_stage


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run whose folder exists."""
    run = Run("20261121-021500-aaaa", workspace=tmp_path)
    with run.lock():
        pass
    return run


def read_record(run: Run) -> RunRecord:
    record = RunRecord.read(run)
    assert record is not None
    return record


def test_a_record_has_the_state_the_reason_and_the_figures_of_the_stages(run: Run) -> None:
    metrics = {"served/recall@20": 0.25, "champion/recall@20": 0.2}
    with run.lock(), record_run(StageContext(run, pipeline="films", options=RunOptions(reason="new prices"))) as ending:
        assert (read_record(run).state, read_record(run).seconds) == ("Running", None)
        commit_stage(run.stage_folder(RegistrationManifest), RegistrationManifest, inputs=["f"], build=lambda folder: {
            "model_name": "m", "version": "3", "alias": "champion", "promoted": True, "reasons": ("better",),
            "mlflow_run_id": "r", "metrics": metrics,
        })  # fmt: skip
        ending.set("Promoted", "version 3 is champion")
    record = read_record(run)
    assert (record.state, record.pipeline, record.options.reason) == ("Promoted", "films", "new prices")
    assert record.message == "version 3 is champion"
    assert (record.figures.version, record.figures.metrics, record.figures.events) == ("3", metrics, None)
    assert list(record.figures.stage_seconds) == ["register"]
    assert record.seconds is not None and 0 <= record.seconds < 60


@pytest.mark.parametrize(
    ("error", "state", "message"),
    [
        (StageError("rank 1 died\nsee its log"), "Failed", "rank 1 died see its log"),
        (
            ValueError("no answer from postgresql://ada:s3cret@db/x"),
            "Failed",
            "ValueError: no answer from postgresql://ada:***@db/x",
        ),
        (KeyboardInterrupt(), "Interrupted", "a signal ended the run: Ctrl-C, SIGTERM or a cancellation"),
    ],
    ids=["expected error", "unexpected error", "signal"],
)
def test_an_exception_is_recorded_without_its_passwords(run: Run, error: BaseException, state: str, message: str) -> None:
    with pytest.raises(type(error)), record_run(StageContext(run, pipeline="films")):
        raise error
    assert (read_record(run).state, read_record(run).message) == (state, message)
    log_path = run.folder / "error.log"  # written only for unexpected errors
    assert log_path.exists() == isinstance(error, ValueError)
    assert not log_path.exists() or "s3cret" not in log_path.read_text()


def test_the_traceback_of_an_error_about_a_path_that_is_not_unicode_is_written(run: Run) -> None:
    path = os.fsdecode(b"\xe4pfel.parquet")
    with pytest.raises(ValueError, match="cannot read"), record_run(StageContext(run, pipeline="films")):
        raise ValueError(f"cannot read {path}")
    assert r"cannot read \udce4pfel.parquet" in (run.folder / "error.log").read_text()


def test_an_error_while_a_signal_is_handled_is_recorded_as_an_interruption(run: Run) -> None:
    with pytest.raises(ValueError, match="Task run is not set"), record_run(StageContext(run, pipeline="films")):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise ValueError("Task run is not set")  # noqa: B904  as Prefect does
    assert read_record(run).state == "Interrupted" and not (run.folder / "error.log").exists()


def _record_until_killed(run: Run, has_started: Any) -> None:
    with run.lock(), record_run(StageContext(run, pipeline="films")):
        has_started.set()
        signal.pause()


def test_the_state_is_running_while_the_process_lives_and_interrupted_after_a_kill(run: Run) -> None:
    fork = multiprocessing.get_context("fork")
    has_started = fork.Event()
    process = fork.Process(target=_record_until_killed, args=(run, has_started), daemon=True)  # ends with this process
    process.start()
    assert has_started.wait(60) and process.pid is not None
    assert read_record(run).state == "Running"
    report_fields = {"metrics": {}, "breaches": (), "warnings": (), "compared_with": None}
    commit_stage(run.stage_folder(DataReportManifest), DataReportManifest, inputs=["f"], build=lambda folder: report_fields)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    record = read_record(run)
    assert (record.state, record.ended) == ("Interrupted", None)
    assert list(record.figures.stage_seconds) == ["check_data"]
    assert f"process {process.pid} on " in record.message


def test_a_run_that_ends_while_its_record_is_read_is_not_interrupted(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run_until_close = ExitStack()
    run_until_close.enter_context(run.lock())
    run_until_close.enter_context(record_run(StageContext(run, pipeline="films"))).set("Promoted", "version 3 is champion")
    is_locked = Run.is_locked

    def end_run_and_test_lock(run: Run) -> bool:
        run_until_close.close()
        return is_locked(run)

    monkeypatch.setattr(Run, "is_locked", end_run_and_test_lock)
    record = read_record(run)
    assert (record.state, record.message, record.ended is None) == ("Promoted", "version 3 is champion", False)


def test_a_run_during_which_the_clock_was_set_back_has_no_duration(run: Run) -> None:
    with run.lock(), record_run(StageContext(run, pipeline="films")):
        started_later = read_record(run).started + timedelta(hours=1)
    assert read_record(run).model_copy(update={"started": started_later}).seconds is None


def test_a_missing_or_damaged_record_is_none(run: Run) -> None:
    assert RunRecord.read(run) is None
    (run.folder / "run.json").write_text("{")
    assert RunRecord.read(run) is None
