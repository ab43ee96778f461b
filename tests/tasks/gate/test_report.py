"""The page of a decision, from real registrations; the page is parsed, and its look is checked by eye."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from recsys_core.comparison.decision import Evidence
from recsys_core.comparison.rules import Comparison
from recsys_core.manifests import RegistrationManifest
from tasks.gate.report import NUM_SAMPLE_USERS
from tasks.gate.report_plots import draw_differences
from tests.tasks.conftest import Stages
from tests.tasks.registration import do_register, run_of

BuildStages = Callable[..., Stages]


@pytest.mark.parametrize(
    ("is_worse", "verdict", "title"),
    [(False, "good", "Promoted: this version is the champion"), (True, "bad", "Not promoted: the version is a challenger")],
)
def test_the_page_shows_the_verdict_the_comparisons_and_sample_users(
    workspace: Path, stages: BuildStages, request: pytest.FixtureRequest, is_worse: bool, verdict: str, title: str
) -> None:
    do_register(stages(), run_of(workspace, "one"))
    context = run_of(workspace, "two", reason="<b>new</b> season")
    registration = do_register(stages(confused=is_worse), context)
    page = (context.run.folder / RegistrationManifest.pages["decision"]).read_text()
    assert re.findall(r'verdict (\w+)"><h2>(.*)</h2>', page) == [(verdict, title)]
    assert all(reason in page for reason in registration.reasons)
    assert page.count("version 1</td>") >= 5 and "coverage@20" in page and "recall@20 of tail items" in page
    assert "&lt;b&gt;new&lt;/b&gt; season" in page and "<b>new" not in page
    assert page.count('<td class="id">') == NUM_SAMPLE_USERS
    assert "<script" not in page and not re.search(r'(src|href)="[^#]', page)


def test_a_page_without_intervals_has_no_plot_of_differences() -> None:
    comparison = Comparison(
        outcome="not_enough_data",
        reason="0",
        num_users=3,
        new_mean=0.0,
        baseline_mean=0.0,
        num_better_users=0,
        num_worse_users=0,
    )
    assert draw_differences([Evidence(subject="recall@20", baseline="version 1", comparison=comparison)]) is None
