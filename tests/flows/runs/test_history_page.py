"""The page of the last runs: its values, its links, and hostile text in messages."""

import re
from datetime import timedelta
from html.parser import HTMLParser
from pathlib import Path

from flows.runs.history_page import to_html
from flows.runs.run_history import newest_promoted_version, run_history
from flows.settings.pipeline import PipelineConfig
from flows.settings.template import starter_config
from tasks.runs.context import RunOptions
from tests.flows.run_folders import FIRST_START, METRIC, month_of_runs, past_run


class Page(HTMLParser):
    """The links, the text and the tags of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src") and tag != "use"]

    def handle_data(self, data: str) -> None:
        self.text += data


def page_of(workspace: Path) -> Page:
    config = config_of(workspace)
    runs = run_history(workspace)
    return Page(to_html(runs, config=config, champion_version=newest_promoted_version(runs)))


def config_of(workspace: Path) -> PipelineConfig:
    return starter_config().model_copy(update={"workspace": workspace, "name": "films"})


def test_the_page_has_verdict_values_plots_and_links_to_existing_files(tmp_path: Path) -> None:
    month_of_runs(tmp_path)
    page, runs = page_of(tmp_path), run_history(tmp_path)
    newest_record = runs[0].record
    assert f"Promoted: version {newest_record.figures.version} is the champion" in page.text
    for listed_run in runs:
        recall = listed_run.new_version_metric(METRIC)
        assert recall is None or f"{recall:.4f}" in page.text
    for state in ("not promoted", "data rejected", "failed", "interrupted"):
        assert state in page.text
    assert "8.91 M" in page.text and "reason: new prices from the shop" in page.text
    assert "1,234 validation users" in page.text
    assert page.text.count("5,678") == 1 + 29  # the newest run, and the table, in which the killed run has no test users
    assert page.tags.count("svg") == 4
    assert len(page.links) > 60 and all((tmp_path / link).is_file() for link in page.links)
    assert any(link.endswith("error.log") for link in page.links)


def test_the_page_loads_nothing_and_text_of_users_is_escaped(tmp_path: Path) -> None:
    hostile_text = "<script>alert(1)</script><img src=x onerror=alert(1)>"
    past_run(
        tmp_path, FIRST_START, state="Failed", message=hostile_text, options=RunOptions(reason=hostile_text), host=hostile_text
    )
    config = config_of(tmp_path).model_copy(update={"name": hostile_text})
    html = to_html(run_history(tmp_path), config=config, champion_version=None)
    page = Page(html)
    assert not {"script", "img", "iframe", "link"} & set(page.tags)
    assert page.text.count(hostile_text) >= 4  # title, heading, message, reason
    assert not re.search(r"(href|src)=\"(https?:)?//", html)


def test_a_page_without_a_run_and_with_one_run_is_complete(tmp_path: Path) -> None:
    assert "No run yet" in page_of(tmp_path).text
    past_run(tmp_path, FIRST_START, state="Failed", num_stages=0, message="no such file")
    page = page_of(tmp_path)
    assert "Failed: there is no champion yet" in page.text and "no such file" in page.text


def test_a_lost_comparison_names_the_version_that_stays_champion(tmp_path: Path) -> None:
    past_run(tmp_path, FIRST_START, state="Promoted", version="7")
    past_run(tmp_path, FIRST_START + timedelta(days=1), state="NotPromoted", version="8", message="recall@20 is lower")
    assert "Not promoted: version 7 stays champion" in page_of(tmp_path).text
