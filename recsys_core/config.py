"""The base of every config and manifest: frozen, strict about keys."""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict


class Frozen(BaseModel):
    """Immutable pydantic model that refuses unknown keys."""

    # JSON has no nan; written as null it could not be read back as a number.
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), ser_json_inf_nan="strings")


def _as_tuple(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


Paths = Annotated[tuple[str, ...], BeforeValidator(_as_tuple)]
"""One path or glob, or a list of them; always a tuple after parsing."""
