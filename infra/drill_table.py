"""Generator of the table of drills in docs/operations.md, from the JUnit file of `make drills`."""

import ast
import json
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
RESULTS_PATH = ROOT / "tests" / "drills" / "results.json"
PAGE_PATH = ROOT / "docs" / "operations.md"
BEGIN_MARK, END_MARK = "<!-- drills: begin -->", "<!-- drills: end -->"
PASSED, SKIPPED, FAILED = "passed", "skipped", "failed"


def main(junit_path: Path) -> None:
    """Add the drills of the JUnit file to results.json and write the table."""
    results: dict[str, Any] = json.loads(RESULTS_PATH.read_text()) if RESULTS_PATH.is_file() else {"drills": {}}
    results["drills"] = dict(sorted((results["drills"] | read_junit(junit_path)).items()))
    results |= {"date": f"{datetime.now(UTC):%Y-%m-%d}", "cores": len(os.sched_getaffinity(0))}
    RESULTS_PATH.write_text(json.dumps(results, indent=1) + "\n")
    PAGE_PATH.write_text(with_table(PAGE_PATH.read_text(encoding="utf-8"), results), encoding="utf-8")


def read_junit(junit_path: Path) -> dict[str, dict[str, Any]]:
    """Return the results of each test file: number of cases by outcome, seconds including set-up, and figures that it reports.

    `processes_left` is the number of processes that the drills left behind, or None if no drill of the file counts them.
    """
    drills: dict[str, dict[str, Any]] = {}
    for case_element in ElementTree.parse(junit_path).iter("testcase"):  # noqa: S314
        test_path = case_element.attrib["classname"].replace(".", "/") + ".py"
        drill_results = drills.setdefault(
            test_path, {PASSED: 0, SKIPPED: 0, FAILED: 0, "seconds": 0.0, "processes_left": None, "figures": []}
        )
        drill_results[_outcome(case_element)] += 1
        drill_results["seconds"] = round(drill_results["seconds"] + float(case_element.attrib["time"]), 1)
        for property_element in case_element.iter("property"):
            if property_element.attrib["name"] == "processes_left":
                drill_results["processes_left"] = (drill_results["processes_left"] or 0) + int(property_element.attrib["value"])
            if property_element.attrib["name"] == "figures":
                drill_results["figures"].append(property_element.attrib["value"])
    return drills


def _outcome(case: ElementTree.Element) -> str:
    if case.find("failure") is not None or case.find("error") is not None:
        return FAILED
    return SKIPPED if case.find("skipped") is not None else PASSED


def with_table(page: str, results: dict[str, Any]) -> str:
    """Return the page with a new table between its marks."""
    text_before, _, table_and_rest = page.partition(BEGIN_MARK)
    _, _, text_after = table_and_rest.partition(END_MARK)
    return f"{text_before}{BEGIN_MARK}\n{drills_table(results)}\n{END_MARK}{text_after}"


def drills_table(results: dict[str, Any]) -> str:
    """Return the table in Markdown, with the first sentence of each test file."""
    lines = [
        f"These results were measured on machines with {results['cores']} cores, the newest of them on {results['date']}:",
        "",
        "| what the drill tests | tests that passed | skipped | failed | seconds | processes left behind |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for test_path, drill in results["drills"].items():
        counts = " | ".join(str(drill[outcome]) for outcome in (PASSED, SKIPPED, FAILED))
        processes_left_cell = "-" if drill["processes_left"] is None else drill["processes_left"]
        lines.append(f"| {_first_sentence(ROOT / test_path)} | {counts} | {drill['seconds']:,.0f} | {processes_left_cell} |")
    figures = [
        f"- `{Path(test_path).name}`: {figure}."
        for test_path, drill in results["drills"].items()
        for figure in drill["figures"]
    ]
    return "\n".join(lines + [""] * bool(figures) + figures)


def _first_sentence(test_path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(test_path.read_text(encoding="utf-8"))) or test_path.name
    sentence = " ".join(docstring.partition("\n\n")[0].split())
    return sentence.replace(": `make drills`.", "").partition(". ")[0].rstrip(".")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
