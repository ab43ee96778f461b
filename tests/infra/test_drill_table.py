"""The table of drills in docs/operations.md, and the results of drills in JUnit files."""

import json
from pathlib import Path

from infra.drill_table import PAGE_PATH, RESULTS_PATH, read_junit, with_table

JUNIT_XML = """<testsuites><testsuite>
<testcase classname="tests.drills.test_up" name="one" time="61.5"><properties>
<property name="processes_left" value="0"/></properties></testcase>
<testcase classname="tests.drills.test_up" name="two" time="8.5"><properties>
<property name="processes_left" value="2"/>
<property name="figures" value="9 s"/></properties>
<failure message="2 processes"/></testcase>
<testcase classname="tests.drills.test_handoff" name="three" time="0.1"><skipped message="no network"/></testcase>
</testsuite></testsuites>"""


def test_the_cases_of_a_file_are_counted_by_outcome_and_their_figures_are_added_up(tmp_path: Path) -> None:
    (tmp_path / "drills.xml").write_text(JUNIT_XML)
    results_by_file = read_junit(tmp_path / "drills.xml")
    counts_by_outcome = {"passed": 1, "skipped": 0, "failed": 1}
    assert results_by_file["tests/drills/test_up.py"] == counts_by_outcome | {
        "seconds": 70.0,
        "processes_left": 2,
        "figures": ["9 s"],
    }
    assert results_by_file["tests/drills/test_handoff.py"]["skipped"] == 1
    assert results_by_file["tests/drills/test_handoff.py"]["processes_left"] is None


def test_the_page_shows_the_committed_results() -> None:
    page = PAGE_PATH.read_text(encoding="utf-8")
    assert with_table(page, json.loads(RESULTS_PATH.read_text())) == page
