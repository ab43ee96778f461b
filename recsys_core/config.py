"""The base of every config and manifest: frozen, strict about keys; and what a name or a path of the user's may be."""

import unicodedata
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

MANY = 1_000_000_000
"""The largest count that a setting takes: of events, users or steps."""
MOST_DAYS = 36_500
"""A hundred years."""
WEEK_S = 604_800
MOST_PATH_CHARACTERS = 4_096


OPERATIONAL = "operational"
"""Annotation of a setting that does not change the result: a resumed run may change it and keeps its completed stages."""


class Frozen(BaseModel):
    """Immutable pydantic model that refuses unknown keys."""

    # JSON has no nan; written as null it could not be read back as a number.
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), ser_json_inf_nan="strings")


class Settings(Frozen):
    """Base of every config: no number is infinite, and true is no number."""

    model_config = ConfigDict(allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_truth_for_a_number(cls, given: Any) -> Any:
        for name, value in given.items() if isinstance(given, dict) else ():
            # pydantic reads true as 1.
            values = value if isinstance(value, list | tuple) else (value,)
            field = cls.model_fields.get(name)
            if field is not None and any(isinstance(one, bool) for one in values) and not _takes_truth(field.annotation):
                raise ValueError(f"{name} is {str(value).lower()}, which is no value of this setting; see `nightjar init`")
        return given

    @classmethod
    def operational(cls) -> set[str]:
        """Return the names of the settings annotated as OPERATIONAL."""
        return {name for name, field in cls.model_fields.items() if OPERATIONAL in field.metadata}

    def result_settings(self) -> dict[str, Any]:
        """Return the settings that change the result, for a fingerprint."""
        return self.model_dump(mode="json", exclude=self.operational())


def _takes_truth(annotation: Any) -> bool:
    return annotation in (bool, Any) or any(_takes_truth(argument) for argument in get_args(annotation))


def _without_control(text: str) -> str:
    wrong = next((char for char in text if unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp")), None)
    if wrong is not None:
        raise ValueError(f"holds the character U+{ord(wrong):04X}, which no name has; leave it out")
    return text


def _without_blanks(text: str) -> str:
    if text != text.strip():
        raise ValueError(f"is {text[:80]!r}, with a blank at its beginning or end; leave the blank out")
    return text


def _as_path(text: str) -> str:
    if not text.strip():
        raise ValueError("is an empty path; name a file or a folder")
    if "\0" in text or any(unicodedata.category(char) == "Cs" for char in text):
        raise ValueError("holds a NUL or half a character (a surrogate), which no path does; leave it out")
    try:
        Path(text).expanduser()
    except RuntimeError:
        raise ValueError(f"is {text[:80]!r}, but there is no user of that name; write the whole path") from None
    return text


def _as_folder(folder: Path) -> Path:
    text = str(folder)
    if len(text) > MOST_PATH_CHARACTERS:
        raise ValueError(f"has {len(text):,} characters; a path has at most {MOST_PATH_CHARACTERS:,}")
    _as_path(text)
    return folder


def _as_tuple(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


Checksums = Annotated[
    Literal["pages", "sidecar"],
    Field(
        description="pages: those that the writer stored in the file, if any; sidecar: also the sha256 in <file>.sha256, as "
        "sha256sum writes it, compared when a file is first read"
    ),
]
Column = Annotated[str, Field(min_length=1, max_length=1_000), AfterValidator(_without_control)]
"""Name of a column."""
Name = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_without_control), AfterValidator(_without_blanks)]
"""A name on one line."""
FilePath = Annotated[str, Field(min_length=1, max_length=MOST_PATH_CHARACTERS), AfterValidator(_as_path)]
"""A path, a glob or a URI."""
Folder = Annotated[Path, AfterValidator(_as_folder)]
Paths = Annotated[tuple[FilePath, ...], BeforeValidator(_as_tuple)]
"""One path or glob, or a list of them; always a tuple after parsing."""
