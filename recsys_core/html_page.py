"""HTML pages without network access or scripts: one stylesheet, and templates in which every value is escaped."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

_LAYOUT_FOLDER = Path(__file__).parent


def render_page(template: Path, *, filters: Mapping[str, Callable[..., Any]], **values: Any) -> str:
    """Render a template that extends html_page.html, the shared head and stylesheet.

    Args:
        template: the template file. Its blocks are `title` and `body`.
        filters: functions that the template calls as `{{ value|name }}`.
        values: variables of the template. A missing variable raises jinja2.UndefinedError.
    """
    environment = Environment(
        loader=FileSystemLoader([template.parent, _LAYOUT_FOLDER]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= filters
    return environment.get_template(template.name).render(values)
