"""Fields of the forms that start flow runs in the Prefect UI."""

from typing import Annotated, Any

from pydantic import Field

from recsys_core.config import MAX_PATH_CHARACTERS

MAX_OVERRIDES = 100


def shown_as(title: str) -> Any:
    """Return a field with the title that the form shows. The form's description is the text in the docstring of the flow."""
    return Field(json_schema_extra={"title": title})


Pipeline = Annotated[str, shown_as("Pipeline"), Field(min_length=1, max_length=MAX_PATH_CHARACTERS)]
Overrides = Annotated[tuple[str, ...], shown_as("Settings to override"), Field(max_length=MAX_OVERRIDES)]
