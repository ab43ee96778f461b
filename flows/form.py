"""Fields of the forms that start flow runs in the Prefect UI."""

from typing import Annotated, Any

from pydantic import Field

from recsys_core.config import MAX_PATH_CHARACTERS

MAX_OVERRIDES = 100


def titled_field(title: str) -> Any:
    """Return a field with a title for the form. The form describes the field with the text in the flow's docstring."""
    return Field(json_schema_extra={"title": title})


ConfigPath = Annotated[str, titled_field("Pipeline"), Field(min_length=1, max_length=MAX_PATH_CHARACTERS)]
Overrides = Annotated[tuple[str, ...], titled_field("Settings to override"), Field(max_length=MAX_OVERRIDES)]
