"""The page of the last runs: its values, its links, and hostile text in messages."""

import re
import shutil
from datetime import timedelta
from html.parser import HTMLParser
from pathlib import Path

import pytest
from mlflow import MlflowClient

from flows.runs.history_page import to_html, write_history_page
from flows.runs.run_history import newest_promoted_version, run_history
from flows.settings.pipeline import PipelineConfig
from flows.settings.template import starter_config
from recsys_core.manifests import STAGES
from tasks.registry.mlflow_client import connect, tracking_uri
from tasks.registry.tracking import open_run
from tasks.runs.context import RunOptions, StageContext
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
    newest = runs[0].record
    assert f"Promoted: version {newest.figures.version} is the champion" in page.text
    for past in runs:
        value = past.new_version_metric(METRIC)
        assert value is None or f"{value:.4f}" in page.text
    for state in ("not promoted", "data rejected", "failed", "interrupted"):
        assert state in page.text
    assert "8.91 M" in page.text and "reason: new prices from the shop" in page.text
    assert "1,234 validation users" in page.text and page.text.count("5,678") == 1 + 29
    assert page.tags.count("svg") == 4
    assert len(page.links) > 60 and all((tmp_path / link).is_file() for link in page.links)
    assert any(link.endswith("error.log") for link in page.links)


def test_the_page_loads_nothing_and_text_of_users_is_escaped(tmp_path: Path) -> None:
    hostile = "<script>alert(1)</script><img src=x onerror=alert(1)>"
    past_run(tmp_path, FIRST_START, state="Failed", message=hostile, options=RunOptions(reason=hostile), host=hostile)
    config = config_of(tmp_path).model_copy(update={"name": hostile})
    html = to_html(run_history(tmp_path), config=config, champion_version=None)
    page = Page(html)
    assert not {"script", "img", "iframe", "link"} & set(page.tags)
    assert page.text.count(hostile) >= 4  # title, heading, message, reason
    assert not re.search(r"(href|src)=\"(https?:)?//", html)


def test_a_page_without_a_run_and_with_one_run_is_complete(tmp_path: Path) -> None:
    assert "No run yet" in page_of(tmp_path).text
    past_run(tmp_path, FIRST_START, state="Failed", stages=0, message="no such file")
    page = page_of(tmp_path)
    assert "Failed: there is no champion yet" in page.text and "no such file" in page.text


def test_a_lost_comparison_says_which_version_stays_champion(tmp_path: Path) -> None:
    past_run(tmp_path, FIRST_START, state="Promoted", version="7")
    past_run(tmp_path, FIRST_START + timedelta(days=1), state="NotPromoted", version="8", message="recall@20 is lower")
    assert "Not promoted: version 7 stays champion" in page_of(tmp_path).text


def test_the_page_shows_the_champion_of_the_registry_and_is_logged_to_mlflow(
    tmp_path: Path, new_database: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    shutil.copy(new_database, tmp_path)
    run = past_run(tmp_path, FIRST_START, state="Promoted", version="2", stages=len(STAGES))
    client = connect(tmp_path)
    mlflow_run_id = open_run(client, StageContext(run, experiment="e"))
    client.create_registered_model(config_of(tmp_path).registry.model_name)
    for _ in range(2):
        client.create_model_version("nightjar", "file:///nowhere", mlflow_run_id)
    client.set_registered_model_alias("nightjar", "champion", "1")  # a rollback
    write_history_page(config_of(tmp_path), StageContext(run, experiment="e"), has_mlflow=True)
    assert "Promoted: version 1 is the champion" in (tmp_path / "index.html").read_text()
    artifacts = MlflowClient(tracking_uri(tmp_path)).list_artifacts(mlflow_run_id, "history")
    assert [artifact.path for artifact in artifacts] == ["history/index.html"]

    (tmp_path / "index.html").unlink()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    write_history_page(config_of(tmp_path), StageContext(run, experiment="e"), has_mlflow=True)
    assert "version 2 is the champion" in (tmp_path / "index.html").read_text()
    assert "could not read the champion" in caplog.text

    (tmp_path / "index.html").unlink()
    caplog.clear()
    write_history_page(config_of(tmp_path), StageContext(run, experiment="e"), has_mlflow=False)
    assert "version 2 is the champion" in (tmp_path / "index.html").read_text()
    assert caplog.text == ""
