"""Checks of the free disk space and of the end of the previous run."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from flows.doctor.installation import check_disk, check_previous_run
from flows.settings.pipeline import PipelineConfig
from flows.settings.schedule import ScheduleConfig
from flows.settings.template import starter_config
from recsys_core.errors import InputError, StageError
from tasks.runs.context import StageContext
from tasks.runs.run import Run
from tasks.runs.run_record import RunRecord, record_run


def test_the_free_disk_is_compared_with_the_newest_run(small_disk: Path) -> None:
    assert check_disk(small_disk).text.endswith("no run yet")
    for name, size in (("20261120-000000-aaaa", 2**10), ("20261121-000000-bbbb", 600 * 2**10)):
        stage = small_disk / "runs" / name / "train"
        stage.mkdir(parents=True)
        (stage / "model").write_bytes(bytes(size))
    finding = check_disk(small_disk)
    assert (
        finding.status == "problem"
        and "run 20261121-000000-bbbb takes 0.0 GiB, and the next run needs about the same space" in finding.text
    )


@pytest.fixture
def config(tmp_path: Path) -> PipelineConfig:
    config = starter_config().with_absolute_paths(tmp_path)
    return config.model_copy(update={"schedule": ScheduleConfig(deadline_minutes=60)})


@pytest.fixture
def run(config: PipelineConfig) -> Run:
    run = Run("20261121-000000-bbbb", workspace=config.workspace)
    run.folder.mkdir(parents=True)
    return run


def test_without_a_run_there_is_no_previous_run(config: PipelineConfig) -> None:
    assert check_previous_run(config) == ("not used", "no run yet")


def test_a_run_that_promoted_is_reported_with_its_end(config: PipelineConfig, run: Run) -> None:
    with record_run(StageContext(run, pipeline=config.name)) as ending:
        ending.set("Promoted", "first version")
    finding = check_previous_run(config)
    assert finding.status == "ok" and finding.text.endswith(" UTC: Promoted, first version")


@pytest.mark.parametrize("error", [InputError("ratings.parquet: no such file"), StageError("rank 1 died")])
def test_a_failed_run_is_a_problem_with_its_reason_and_the_command_that_resumes_it(
    config: PipelineConfig, run: Run, error: Exception
) -> None:
    with pytest.raises(type(error)), record_run(StageContext(run, pipeline=config.name)):
        raise error
    finding = check_previous_run(config)
    assert finding.status == "problem"
    assert finding.text.endswith(f"Failed, {error}; resume it with --resume 20261121-000000-bbbb")


@pytest.mark.parametrize(("minutes", "status"), [(5, "ok"), (90, "problem")])
def test_a_running_run_is_a_problem_after_its_deadline(config: PipelineConfig, run: Run, minutes: int, status: str) -> None:
    with run.lock(), record_run(StageContext(run, pipeline=config.name)) as ending:
        record = RunRecord.read(run)
        assert record is not None
        record.model_copy(update={"started": datetime.now(UTC) - timedelta(minutes=minutes)}).write(run)
        finding = check_previous_run(config)
        ending.set("StoppedEarly", "")
    assert finding.status == status and "is running for" in finding.text
    assert ("longer than schedule.deadline_minutes 60" in finding.text) == (status == "problem")
