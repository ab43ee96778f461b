"""HTML pages without network access or scripts: one stylesheet, and templates in which every value is escaped."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

_LAYOUT_FOLDER = Path(__file__).parent


def render_page(template_path: Path, *, filters: Mapping[str, Callable[..., Any]], **variables: Any) -> str:
    """Render a template that extends html_page.html, the shared head and stylesheet.

    Args:
        template_path: the template file. Its blocks are `title` and `body`.
        filters: functions that the template calls as `{{ value|name }}`.
        variables: the template's variables. A missing variable raises jinja2.UndefinedError.
    """
    environment = Environment(
        loader=FileSystemLoader([template_path.parent, _LAYOUT_FOLDER]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= filters
    return environment.get_template(template_path.name).render(variables)
