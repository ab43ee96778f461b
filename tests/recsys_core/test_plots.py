"""Figures, their output formats, and pages that extend the shared layout."""

import re
from pathlib import Path

import pytest
from jinja2 import UndefinedError
from matplotlib.figure import Figure

from recsys_core import plots


def loss_figure() -> Figure:
    figure, axes = plots.new_figure(title="Loss")
    axes.plot([1, 2], [3, 4], color=plots.BLUE, label="loss")
    plots.legend_above(axes)
    return figure


def test_an_svg_uses_the_colours_of_the_page_and_is_reproducible() -> None:
    svg = plots.to_svg(loss_figure())
    assert svg.startswith("<svg") and "var(--blue)" in svg and plots.BLUE not in svg
    assert svg == plots.to_svg(loss_figure())


def test_every_colour_variable_of_an_svg_is_defined_for_light_and_dark_pages() -> None:
    page = Path(plots.__file__).with_name("html_page.html").read_text(encoding="utf-8")
    for variable in set(re.findall(r"var\(--([a-z]+)\)", plots.to_svg(loss_figure()))):
        assert page.count(f"--{variable}:") == 2, variable


def test_a_png_has_the_title_and_the_legend(tmp_path: Path) -> None:
    figure = loss_figure()
    assert plots.save_png(figure, tmp_path / "figure.png").stat().st_size > 1_000
    assert figure.axes[0].get_title(loc="left") == "Loss"
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["loss"]


def write_template(folder: Path, body: str) -> Path:
    path = folder / "page.html"
    path.write_text(f'{{% extends "html_page.html" %}}{{% block body %}}{body}{{% endblock %}}')
    return path


def test_a_page_has_the_shared_style_and_escapes_values(tmp_path: Path) -> None:
    page = plots.render_page(
        write_template(tmp_path, "<p>{{ name|double }}</p>"), filters={"double": lambda text: 2 * text}, name="<b>"
    )
    assert "prefers-color-scheme: dark" in page and "<p>&lt;b&gt;&lt;b&gt;</p>" in page


def test_a_missing_variable_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UndefinedError, match="name"):
        plots.render_page(write_template(tmp_path, "{{ name }}"), filters={})
