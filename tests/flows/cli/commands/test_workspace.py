"""`nightjar history`: the table and the JSON of the last runs."""

import json
from pathlib import Path

import pytest

from tests.flows.cli.test_main import nightjar
from tests.flows.run_folders import FAILED_DAY, KILLED_DAY, month_of_runs


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    path = tmp_path / "nightly.yaml"
    path.write_text("workspace: .\ninteractions: {paths: log.parquet, timestamp_column: timestamp}\n")
    return path


def test_the_table_has_a_line_per_run_and_the_messages_of_runs_without_promotion(
    config_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert nightjar("history", config_path, monkeypatch=monkeypatch) == 0
    assert "no run in" in capsys.readouterr().out
    runs = month_of_runs(config_path.parent)
    assert nightjar("history", config_path, "--last", "12", monkeypatch=monkeypatch) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["run", "(UTC)", "ended"]
    assert [line.split()[0] for line in lines[1:13]] == [run.run_id for run in reversed(runs[-12:])]
    assert "promoted" in lines[1] and "44 min" in lines[1] and "20.8 M" in lines[1]
    failed_run_id, killed_run_id = runs[FAILED_DAY].run_id, runs[KILLED_DAY].run_id
    assert f"{failed_run_id}  the launch failed: rank 1 (pid 28123) ended with SIGKILL" in "\n".join(lines[13:])
    assert f"{killed_run_id}  process 4711 on trainer-1 ended without a record" in "\n".join(lines[13:])
    assert lines[-1].split() == ["page", str(config_path.parent / "index.html")]


def test_the_option_json_prints_an_object_per_run(
    config_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (run, *_) = month_of_runs(config_path.parent, num_runs=1)
    assert nightjar("history", config_path, "--json", monkeypatch=monkeypatch) == 0
    (run_json,) = json.loads(capsys.readouterr().out)
    assert (run_json["run_id"], run_json["run_dir"]) == (run.run_id, str(run.folder))
    assert (run_json["state"], run_json["version"]) == ("Promoted", "41")
    assert run_json["ended"] == "2026-10-24T02:58:56Z" and run_json["seconds"] == 2626  # the stages and 40 s, see `past_run`
    assert run_json["metric"] == "recall@20" and 0 < run_json["new"] < 1 and run_json["champion"] == 0.212
    assert run_json["stage_seconds"]["train"] == 1900 and run_json["events"] > 10_000_000 and run_json["disk_bytes"] > 0
