"""The page of a decision, for real registrations. The tests check the text of the page, not how it looks."""

import re
from datetime import timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from matplotlib.colors import to_hex

from recsys_core import plots
from recsys_core.comparison.decision import Evidence
from recsys_core.comparison.rules import Comparison
from recsys_core.manifests import RegistrationManifest
from tasks.gate import report
from tasks.gate.report import NUM_SAMPLE_USERS, _sample_users
from tasks.gate.report_plots import RecommendedItems, draw_differences, draw_popularity, draw_scores, draw_trend
from tasks.registry.mlflow_client import connect
from tasks.registry.releases import REFIT_OF_TAG
from tests.flows.run_folders import FIRST_START, past_run
from tests.tasks.conftest import AddVersions, BuildStages
from tests.tasks.registration import prepare_run, register_version


@pytest.mark.parametrize(
    ("is_worse", "verdict_class", "title"),
    [(False, "good", "Promoted: this version is the champion"), (True, "bad", "Not promoted: the version is a challenger")],
    ids=["equal version", "worse version"],
)
def test_the_page_shows_the_verdict_the_comparisons_and_sample_users(
    workspace: Path,
    build_stages: BuildStages,
    add_versions: AddVersions,
    in_process_predictions: list[str],
    is_worse: bool,
    verdict_class: str,
    title: str,
) -> None:
    add_versions("good")
    context = prepare_run(workspace, "two", reason="<b>new</b> season")
    registration = register_version(build_stages(shuffled=is_worse), context)
    page = (context.run.folder / RegistrationManifest.pages["decision"]).read_text()
    assert re.findall(r'verdict (\w+)"><h2>(.*)</h2>', page) == [(verdict_class, title)]
    assert all(reason in page for reason in registration.reasons)
    assert page.count("version 1</td>") >= 5 and "coverage@20" in page and "recall@20 of tail items" in page
    assert "&lt;b&gt;new&lt;/b&gt; season" in page and "<b>new" not in page
    assert page.count('<td class="id">') == NUM_SAMPLE_USERS
    assert "<td>head items</td>" in page and "not enough data (30 users needed)" in page
    section_titles = re.findall(r"<h2>([^<]*)</h2>", page)
    assert section_titles[1] == "Comparisons"
    assert {*section_titles[2:]} == {
        "Scores of the recommended items", "Popularity of the recommended items", "Training", "Index",
        "Metrics over the full catalogue", "Recommended items", "Slices of the test events, for the model",
        "Recommendations of test users",
    }  # fmt: skip
    assert "recall@100 against exact search" in page  # the axis of the curve of the index
    assert "<script" not in page and not re.search(r'(src|href)="[^#]', page)


@pytest.mark.usefixtures("empty_plots")
def test_the_plots_show_the_version_that_the_comparisons_are_about(
    workspace: Path,
    build_stages: BuildStages,
    add_versions: AddVersions,
    in_process_predictions: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    add_versions("good", "good")
    connect(workspace).set_model_version_tag("m", "2", REFIT_OF_TAG, "1")
    plotted_versions: list[str] = []
    monkeypatch.setattr(report, "draw_scores", plotted_versions.extend)
    register_version(build_stages(), prepare_run(workspace, "three"))  # version 2 is champion, but version 1 is compared
    assert plotted_versions == ["version 3", "version 1"]


def test_a_version_has_the_same_colour_in_every_plot_and_the_test_events_are_grey() -> None:
    recommended_items = RecommendedItems(score_L=np.array([0.5, 0.4]), item_row_L=np.array([0, 1]))
    for versions in ({"version 1": recommended_items}, {"version 2": recommended_items, "version 1": recommended_items}):
        score_patches = draw_scores(versions).axes[0].patches
        popularity_lines = draw_popularity(versions, train_count_I=np.array([3, 1]), target_item_T=np.array([1])).axes[0].lines
        assert [line.get_color() for line in popularity_lines[:-1]] == [
            to_hex(patch.get_edgecolor()) for patch in score_patches
        ]
        assert popularity_lines[-1].get_color() == plots.GREY


def test_the_trend_has_thirty_versions_and_ends_with_the_new_version(tmp_path: Path) -> None:
    for day in range(40):
        start = FIRST_START + timedelta(days=day)
        has_failed = day % 10 == 9
        version_fields = {} if has_failed else {"version": str(day), "metrics": {"served/recall@20": day / 100}}
        past_run(tmp_path, start, state="Failed" if has_failed else "Promoted" if day % 2 else "NotPromoted", **version_fields)
    registration = RegistrationManifest.model_construct(version="99", metrics={"served/recall@20": 0.5}, promoted=True)
    axes = draw_trend(registration, prepare_run(tmp_path, "20990101-000000-ffff"), metric="recall@20").axes[0]
    recalls = list(axes.lines[0].get_ydata())
    assert (len(recalls), recalls[-1]) == (30, 0.5)
    assert recalls[:-1] == [day / 100 for day in range(40) if day % 10 != 9][-29:]
    context_without_runs = prepare_run(tmp_path / "empty", "20990101-000000-ffff")
    assert draw_trend(registration, context_without_runs, metric="recall@20") is None


def test_sample_users_have_titles_of_items_and_ids_of_items_without_title(tmp_path: Path) -> None:
    pq.write_table(pa.table({"user_id": ["ann"], "history": [[5, 7]]}), tmp_path / "cases.parquet")
    pq.write_table(pa.table({"item_ids": [[7, 9]], "scores": [[0.9, 0.8]]}), tmp_path / "answers-3.parquet")
    sample_users = _sample_users(tmp_path, version_number="3", title_by_id={7: "Seven", 5: "Five"})
    assert sample_users == [("ann", ["Seven", "Five"], [("Seven", 0.9), ("9", 0.8)])]


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
