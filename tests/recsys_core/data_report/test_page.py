"""The page of the data report (report.html) and its Markdown summary."""

import re
from html.parser import HTMLParser
from pathlib import Path

from recsys_core.data_report.page import to_html, to_markdown
from recsys_core.manifests import ColumnStatistics
from tests.recsys_core.data_report.small_reports import report_manifest_of, report_of, user_events
from tests.recsys_core.ingest.interactions_with_times import interactions_of

HOSTILE_TEXT = "<script>alert('&')</script>\u202e\x00\""
"""A script, quotes, a character that reverses the text after it (U+202E), and a null character."""


class _TagCollector(HTMLParser):
    """Parser that collects the tags of a page and the addresses in its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "action")]


def test_the_page_is_one_file_and_escapes_all_values_of_the_data(tmp_path: Path) -> None:
    hostile_fields = {
        "columns": {HOSTILE_TEXT: ColumnStatistics(num_nulls=1, min_value=HOSTILE_TEXT)},
        "num_removed_events_by_filter": {HOSTILE_TEXT: 2},
        "num_bad_rows_by_reason": {HOSTILE_TEXT: 1},
    }
    previous_interactions = interactions_of(tmp_path / "previous", [user_events(0, 1)], item_ids=[HOSTILE_TEXT, "x" * 10_000])
    interactions = interactions_of(
        tmp_path / "current", [user_events(0, 0, 1)], item_ids=[HOSTILE_TEXT, "y" * 10_000], **hostile_fields
    )
    manifest, report = report_of(tmp_path, interactions, previous=previous_interactions, max_null_share=0)
    page = manifest.path("report.html").read_text(encoding="utf-8")
    parser = _TagCollector()
    parser.feed(page)
    assert "script" not in parser.tags and {"svg", "table"} <= parser.tags
    assert all(address.startswith("#") for address in parser.addresses), parser.addresses
    assert not re.search(r"url\((?!#)|@import", page)
    assert "<script>" not in page and "&lt;script&gt;" in page and "\u202e" not in page and "\x00" not in page
    assert "x" * 100 not in page and len(page) < 300_000
    page_of_hostile_run = to_html(report, run_name=HOSTILE_TEXT)
    assert "<script>" not in page_of_hostile_run
    markdown = to_markdown(manifest, page_path=manifest.path("report.html"))
    assert "**1 limit violated**" in markdown and "<script>" not in markdown


def test_the_page_shows_removed_events_by_filter_and_the_bot_users_in_the_row_of_their_events(tmp_path: Path) -> None:
    removed_counts = {"duplicates": 7, "bot_users": 2, "bot_events": 1_234}
    interactions = interactions_of(
        tmp_path / "log", [user_events(0, 1)], item_ids=["a", "b"], num_removed_events_by_filter=removed_counts
    )
    page = report_manifest_of(tmp_path, interactions).path("report.html").read_text(encoding="utf-8")
    filter_rows = re.findall(r'<td class="id">filter: (.*?)</td><td class="n">(.*?)</td>', page)
    assert filter_rows == [("duplicates", "7"), ("bot_events of 2 users", "1,234")]
