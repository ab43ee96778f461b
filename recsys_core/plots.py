"""Figures and HTML pages. A figure is saved as a PNG file, or as an SVG element that follows the colours of its page.

matplotlib is imported where a figure is created, because most commands draw nothing.
"""

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

if TYPE_CHECKING:
    from types import ModuleType

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK: Final = "#36424f"
GRID: Final = "#dfe4ea"
BLUE: Final = "#22577a"
GREEN: Final = "#57a773"
ORANGE: Final = "#e0a030"
GREY: Final = "#b4bcc5"
RED: Final = "#b3261e"

_CSS_VARIABLE_BY_COLOUR = {INK: "ink", GRID: "line", BLUE: "blue", GREEN: "green", ORANGE: "orange", GREY: "grey", RED: "bad"}
"""Variable of html_page.html for each colour. In an SVG, the variables follow the page's light or dark scheme."""
_STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": INK,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "axes.labelcolor": INK,
    "axes.edgecolor": GRID,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "legend.labelcolor": INK,
}


def new_figure(*, title: str = "", grid_axis: str = "both", size: tuple[float, float] = (6.4, 3.8)) -> "tuple[Figure, Axes]":
    """Create a figure with one pair of axes. grid_axis: "x", "y" or "both"; size: width and height in inches."""
    figure, (axes,) = new_panels(1, title=title, grid_axis=grid_axis, size=size)
    return figure, axes


def new_panels(
    num_panels: int, *, title: str, grid_axis: str = "both", size: tuple[float, float] = (6.4, 5.4)
) -> "tuple[Figure, list[Axes]]":
    """Create a figure with `num_panels` axes in one column that share the x axis. The title is above the first axes."""
    from matplotlib.figure import Figure

    with _matplotlib().rc_context({**_STYLE, "axes.grid.axis": grid_axis}):
        figure = Figure(figsize=size, dpi=130, layout="constrained")
        panels = list(figure.subplots(num_panels, 1, sharex=True, squeeze=False)[:, 0])
        panels[0].set_title(title)
    return figure, panels


def _matplotlib() -> "ModuleType":
    """Import matplotlib on first use, because the import takes 0.2 s."""
    import matplotlib

    return matplotlib


def legend_above(axes: "Axes", *, num_columns: int = 4) -> None:
    """Place a one-line legend between the title and the axes, where it hides no data."""
    axes.legend(
        frameon=False, fontsize=8, labelcolor=INK, loc="lower left", bbox_to_anchor=(0, 1), ncols=num_columns,
        borderaxespad=0.2, borderpad=0.2, handlelength=1.6,
    )  # fmt: skip
    with _matplotlib().rc_context(_STYLE):
        axes.set_title(axes.get_title(loc="left"), pad=22)


def save_png(figure: "Figure", path: Path) -> Path:
    """Write the figure as a PNG file. Return `path`."""
    figure.savefig(path, facecolor="white")
    return path


def to_svg(figure: "Figure") -> Markup:
    """Return the figure as an <svg> element with a transparent background. Equal figures become equal texts."""
    svg_buffer = io.StringIO()
    with _matplotlib().rc_context({"svg.fonttype": "none", "svg.hashsalt": "nightjar", "font.family": "sans-serif"}):
        figure.savefig(svg_buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = svg_buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    for colour, css_variable in _CSS_VARIABLE_BY_COLOUR.items():
        svg = svg.replace(colour, f"var(--{css_variable})")
    return Markup(svg)  # noqa: S704 matplotlib escapes the text of its figures


def render_page(template_path: Path, *, filters: Mapping[str, Callable[..., Any]], **variables: Any) -> str:
    """Render a template that extends html_page.html, the shared head and stylesheet. Every value is escaped.

    The page loads nothing from the network and has no scripts.

    Args:
        template_path: the template file. Its blocks are `title` and `body`.
        filters: functions that the template calls as `{{ value|name }}`.
        variables: the template's variables. A missing variable raises jinja2.UndefinedError.
    """
    environment = Environment(
        loader=FileSystemLoader([template_path.parent, Path(__file__).parent]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= filters
    return environment.get_template(template_path.name).render(variables)
