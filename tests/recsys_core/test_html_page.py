"""Pages that extend the shared layout."""

from pathlib import Path

import pytest
from jinja2 import UndefinedError

from recsys_core.html_page import render_page


def template(folder: Path, body: str) -> Path:
    path = folder / "page.html"
    path.write_text(f'{{% extends "html_page.html" %}}{{% block body %}}{body}{{% endblock %}}')
    return path


def test_a_page_has_the_shared_style_and_escapes_values(tmp_path: Path) -> None:
    page = render_page(template(tmp_path, "<p>{{ name|double }}</p>"), filters={"double": lambda text: 2 * text}, name="<b>")
    assert "prefers-color-scheme: dark" in page and "<p>&lt;b&gt;&lt;b&gt;</p>" in page


def test_a_missing_variable_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UndefinedError, match="name"):
        render_page(template(tmp_path, "{{ name }}"), filters={})
