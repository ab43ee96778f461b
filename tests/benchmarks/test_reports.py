"""Each committed benchmark report shows the committed result, and small benchmark runs write a result and its report."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import evaluate, gate, index, ingest, nightly, serve, train
from benchmarks.quality.report import write_report

BENCHMARKS_FOLDER = Path(__file__).parents[2] / "benchmarks"
TO_MARKDOWN_BY_NAME: dict[str, Callable[[Any], str]] = {
    "evaluate": evaluate.to_markdown,
    "gate": gate.to_markdown,
    "index": index.to_markdown,
    "ingest": ingest._to_markdown,
    "nightly": nightly.to_markdown,
    "serve": serve.to_markdown,
    "train": train.to_markdown,
}


@pytest.mark.parametrize("benchmark_name", TO_MARKDOWN_BY_NAME)
def test_a_report_shows_the_numbers_of_the_stored_result(benchmark_name: str) -> None:
    result = json.loads((BENCHMARKS_FOLDER / f"{benchmark_name}.json").read_text())
    assert (
        TO_MARKDOWN_BY_NAME[benchmark_name](result).strip() == (BENCHMARKS_FOLDER / f"{benchmark_name}.md").read_text().strip()
    )


def test_the_report_of_the_quality_benchmark_shows_the_numbers_of_the_stored_result(tmp_path: Path) -> None:
    write_report(json.loads((BENCHMARKS_FOLDER / "quality" / "results.json").read_text()), folder=tmp_path)
    assert (tmp_path / "report.md").read_text() == (BENCHMARKS_FOLDER / "quality" / "report.md").read_text()


def test_a_small_comparison_of_index_kinds_writes_a_result_and_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "FOLDER", tmp_path)
    monkeypatch.setattr(index, "KINDS", {name: index.KINDS[name] for name in ("flat", "ivf_flat")})
    index.main(["--items", "3000", "--queries", "20", "--rounds", "2"])
    result = json.loads((tmp_path / "index.json").read_text())
    assert (result["items"], result["queries"], result["rounds"]) == (3_000, 20, 2)
    assert list(result["rows"]) == ["flat", "ivf_flat", index.FIRST_INDEX]
    for row in result["rows"].values():
        assert 0 < row["recall"] <= 1 and len(row["queries_per_s"]) == 2 and row["bytes"] > 3_000
    assert result["rows"]["flat"]["recall"] == 1
    assert result["rows"]["ivf_flat"]["recall"] > result["rows"][index.FIRST_INDEX]["recall"]
    assert (tmp_path / "index.md").read_text() == index.to_markdown(result)


def test_a_small_simulation_of_the_gate_writes_a_result_and_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"FOLDER": tmp_path, "NUM_RUNS": 20, "NUM_TIMED_USERS": 50, "NUM_USERS": (5_000,)}.items():
        monkeypatch.setattr(gate, name, value)
    gate.main()
    result = json.loads((tmp_path / "gate.json").read_text())
    assert [row["relative_drop"] for row in result["rates"]] == list(gate.DROPS)
    assert all(sum(row[outcome] for outcome in gate.OUTCOMES) == pytest.approx(1) for row in result["rates"])
    assert result["rates"][0]["accepted"] > result["rates"][-1]["accepted"]
    assert (tmp_path / "gate.md").read_text() == gate.to_markdown(result)


@pytest.mark.parametrize("case_name", evaluate.CASES)
def test_the_contestants_of_the_evaluation_compute_the_same_recall(case_name: str) -> None:
    case = evaluate.Case(
        num_queries=40,
        num_items=300,
        targets_per_query=5,
        seen_per_target=4,
        k=20,
        reference=evaluate.CASES[case_name].reference,
    )
    result_by_contestant = {
        contestant: evaluate.measure(case, contestant) for contestant in ("nightjar", "numpy", case.reference)
    }
    assert result_by_contestant["nightjar"]["recall"] == pytest.approx(result_by_contestant["numpy"]["recall"], abs=1e-6)
    assert all((result["seconds"] or 0) > 0 for result in result_by_contestant.values())
