"""Checks of the disk and the shared memory, and checks that fail or take too long."""

import threading
from pathlib import Path

import pytest

from flows.doctor.installation import check_disk, check_log_engine, check_shared_memory, run_checks
from flows.doctor.servers import Finding, ok
from flows.settings.pipeline import PipelineConfig
from recsys_core.ingest.log.spark_engine import installation
from recsys_core.units import MIB
from tasks.runs.workspace import Workspace
from tests.tasks.retention.run_folders_by_hand import build_template


def test_checks_run_at_the_same_time_and_a_check_without_result_is_a_problem() -> None:
    both_checks_barrier, end_of_test = threading.Barrier(2), threading.Event()

    def succeed() -> Finding:
        both_checks_barrier.wait(5)
        return ok("fine")

    def fail() -> Finding:
        both_checks_barrier.wait(5)
        raise OSError("s3://ada:s3cret@bucket is gone")

    def wait() -> Finding:
        end_of_test.wait()
        return ok("too late")

    findings = run_checks({"succeed": succeed, "fail": fail, "wait": wait}, timeout_s=0.5)
    assert findings["succeed"] == ok("fine")
    assert findings["fail"] == ("problem", "OSError: s3://ada:***@bucket is gone")
    assert findings["wait"].status == "problem" and findings["wait"].text.startswith("no result within 0.5 s")
    end_of_test.set()


def test_little_shared_memory_is_a_problem_with_the_option_that_enlarges_it(small_disk: Path) -> None:
    finding = check_shared_memory(small_disk)
    assert finding.status == "problem" and "--shm-size" in finding.text
    assert check_shared_memory(small_disk / "missing").status == "problem"


def test_the_free_disk_is_compared_with_the_newest_run(small_disk: Path) -> None:
    assert check_disk(small_disk, budget_gib=None).text.endswith("no run yet")
    for run_id, num_bytes in (("20261120-000000-aaaa", 2**10), ("20261121-000000-bbbb", 600 * 2**10)):
        stage_folder = small_disk / "runs" / run_id / "train"
        stage_folder.mkdir(parents=True)
        (stage_folder / "model").write_bytes(bytes(num_bytes))
    finding = check_disk(small_disk, budget_gib=None)
    assert (
        finding.status == "problem" and "the next run needs about 0.0 GiB, like earlier runs; remove old runs" in finding.text
    )


def test_the_free_disk_is_compared_with_the_newest_complete_run_after_a_failed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete_run = Workspace(tmp_path).run("20261120-000000-aaaa")
    build_template(complete_run.folder)
    (complete_run.folder / "train.work" / "values").write_bytes(bytes(5 * MIB))
    (tmp_path / "runs" / "20261121-000000-bbbb" / "ingest_interactions").mkdir(parents=True)
    for num_free_bytes, status in ((5 * MIB, "problem"), (20 * MIB, "ok")):
        monkeypatch.setattr("flows.doctor.installation.free_bytes", lambda path, free=num_free_bytes: free)
        assert check_disk(tmp_path, budget_gib=None).status == status


def test_the_disk_budget_is_compared_with_the_workspace_and_the_next_run(tmp_path: Path) -> None:
    complete_run = Workspace(tmp_path).run("20261120-000000-aaaa")
    build_template(complete_run.folder)
    (complete_run.folder / "train.work" / "values").write_bytes(bytes(50 * MIB))
    for budget_gib, status in ((0.07, "problem"), (0.15, "ok")):  # the workspace and the next run have about 50 MiB each
        finding = check_disk(tmp_path, budget_gib=budget_gib)
        assert finding.status == status
        assert f"; the workspace has 0.0 GiB, and retention.disk_budget_gb is {budget_gib}" in finding.text


def test_the_engine_of_the_ingest_is_checked_only_if_the_config_names_one(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"interactions": {"paths": "log.parquet", "timestamp_column": "t"}}
    assert check_log_engine(PipelineConfig.model_validate(settings)) == (
        "not used",
        "the engine DuckDB is installed with nightjar",
    )
    monkeypatch.setattr(installation, "check_installation", lambda: "Spark 4.0.1, Java 17")
    settings["interactions"]["engine"] = {"kind": "spark", "master": "spark://127.0.0.1:9"}  # type: ignore[assignment]
    finding = check_log_engine(PipelineConfig.model_validate(settings))
    assert finding.status == "problem" and "no Spark master answers at spark://127.0.0.1:9" in finding.text
    settings["interactions"]["engine"] = {"kind": "spark"}  # type: ignore[assignment]
    assert check_log_engine(PipelineConfig.model_validate(settings)) == ("ok", "Spark 4.0.1, Java 17, master local[*]")
