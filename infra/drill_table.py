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
RESULTS = ROOT / "tests" / "drills" / "results.json"
PAGE = ROOT / "docs" / "operations.md"
BEGIN, END = "<!-- drills: begin -->", "<!-- drills: end -->"
PASSED, SKIPPED, FAILED = "passed", "skipped", "failed"


def main(junit_file: Path) -> None:
    """Add the drills of the JUnit file to results.json and write the table."""
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {"drills": {}}
    results["drills"] = dict(sorted((results["drills"] | read_junit(junit_file)).items()))
    results |= {"date": f"{datetime.now(UTC):%Y-%m-%d}", "cores": len(os.sched_getaffinity(0))}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), results), encoding="utf-8")


def read_junit(file: Path) -> dict[str, dict[str, Any]]:
    """Return the figures of each test file: number of cases by outcome, seconds with set-up, and further figures.

    `processes_left` is the number of processes that the drills left; None if no drill of the file counts them.
    """
    drills: dict[str, dict[str, Any]] = {}
    for case in ElementTree.parse(file).iter("testcase"):  # noqa: S314
        name = case.attrib["classname"].replace(".", "/") + ".py"
        drill = drills.setdefault(
            name, {PASSED: 0, SKIPPED: 0, FAILED: 0, "seconds": 0.0, "processes_left": None, "figures": []}
        )
        drill[_outcome(case)] += 1
        drill["seconds"] = round(drill["seconds"] + float(case.attrib["time"]), 1)
        for entry in case.iter("property"):
            if entry.attrib["name"] == "processes_left":
                drill["processes_left"] = (drill["processes_left"] or 0) + int(entry.attrib["value"])
            if entry.attrib["name"] == "figures":
                drill["figures"].append(entry.attrib["value"])
    return drills


def _outcome(case: ElementTree.Element) -> str:
    if case.find("failure") is not None or case.find("error") is not None:
        return FAILED
    return SKIPPED if case.find("skipped") is not None else PASSED


def with_table(page: str, results: dict[str, Any]) -> str:
    """Return the page with the table between its markers replaced."""
    before, _, table_and_end = page.partition(BEGIN)
    _, _, after = table_and_end.partition(END)
    return f"{before}{BEGIN}\n{table(results)}\n{END}{after}"


def table(results: dict[str, Any]) -> str:
    """Return the table in Markdown, with the first sentence of each test file."""
    lines = [
        f"These results were measured on {results['date']} on a machine with {results['cores']} cores:",
        "",
        "| what the drill tests | tests that passed | skipped | failed | seconds | processes left behind |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, drill in results["drills"].items():
        counts = " | ".join(str(drill[outcome]) for outcome in (PASSED, SKIPPED, FAILED))
        left_cell = "-" if drill["processes_left"] is None else drill["processes_left"]
        lines.append(f"| {_title(ROOT / name)} | {counts} | {drill['seconds']:,.0f} | {left_cell} |")
    figures = [f"{text}." for drill in results["drills"].values() for text in drill["figures"]]
    return "\n".join(lines + [""] * bool(figures) + figures)


def _title(file: Path) -> str:
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or file.name
    sentence = " ".join(docstring.partition("\n\n")[0].split())
    return sentence.replace(": `make drills`.", "").partition(". ")[0].rstrip(".")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
