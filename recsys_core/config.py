"""Base classes of configs and manifests, and the types of names and paths in them."""

import re
import unicodedata
from pathlib import Path
from typing import Annotated, Any, Literal, get_args
from urllib.parse import parse_qsl

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from recsys_core.errors import MAX_SHOWN_CHARACTERS, printable, redacted

MAX_COUNT = 1_000_000_000
"""Largest value of a setting that counts events, users or steps."""
MAX_DAYS = 36_500
"""Largest value of a setting in days: a hundred years."""
WEEK_S = 604_800
MAX_PATH_CHARACTERS = 4_096
PREFECT_BANNED_CHARACTERS = ("/", "%", "&", ">", "<")

OPERATIONAL = "operational"
"""Annotation of a setting that does not change the result: a resumed run may change it and keeps its completed stages."""


class Frozen(BaseModel):
    """An immutable pydantic model that rejects unknown keys."""

    # JSON has no NaN. pydantic would write null, which it cannot read back as a number.
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), ser_json_inf_nan="strings")


class Settings(Frozen):
    """Base of every config: numbers are finite, and a boolean is not accepted as a number."""

    model_config = ConfigDict(allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _reject_bool_as_number(cls, settings: Any) -> Any:
        for setting_name, setting_value in settings.items() if isinstance(settings, dict) else ():
            # Without this check pydantic would convert true to 1.
            elements = setting_value if isinstance(setting_value, list | tuple) else (setting_value,)
            field = cls.model_fields.get(setting_name)
            if (
                field is not None
                and any(isinstance(element, bool) for element in elements)
                and not _accepts_bool(field.annotation)
            ):
                value_text = printable(str(setting_value).lower(), max_characters=MAX_SHOWN_CHARACTERS)
                raise ValueError(f"{setting_name} is {value_text}, which is not a value of this setting; see `nightjar init`")
        return settings

    @classmethod
    def operational_settings(cls) -> set[str]:
        """Return the names of the settings annotated as OPERATIONAL."""
        return {setting_name for setting_name, field in cls.model_fields.items() if OPERATIONAL in field.metadata}

    def result_settings(self) -> dict[str, Any]:
        """Return the settings that change the result, for a fingerprint."""
        return self.model_dump(mode="json", exclude=self.operational_settings())


def _accepts_bool(annotation: Any) -> bool:
    return annotation in (bool, Any) or any(_accepts_bool(argument) for argument in get_args(annotation))


def _check_control_characters(text: str) -> str:
    control_char = next((char for char in text if unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp")), None)
    if control_char is not None:
        raise ValueError(f"contains the control character U+{ord(control_char):04X}; remove it")
    return text


def _check_outer_blanks(text: str) -> str:
    if text != text.strip():
        raise ValueError(f"is {text[:80]!r}, with a blank at its beginning or end; remove the blank")
    return text


def _check_path(path_text: str) -> str:
    if not path_text.strip():
        raise ValueError("is an empty path; name a file or a folder")
    if "\0" in path_text or any(unicodedata.category(char) == "Cs" for char in path_text):
        raise ValueError("contains NUL or a surrogate (half a character), which a path cannot contain; remove it")
    if (uri_match := URI_PATTERN.fullmatch(path_text)) is not None:
        _check_uri(scheme=uri_match[1].lower(), authority=uri_match[2], query=uri_match[4] or "")
    try:
        Path(path_text).expanduser()
    except RuntimeError:
        raise ValueError(f"is {path_text[:80]!r}, but the user after ~ does not exist; write the whole path") from None
    return path_text


def _check_uri(*, scheme: str, authority: str, query: str) -> None:
    """Reject unknown options, and credentials, because a config is copied into the folder of each run and into MLflow."""
    user_info = authority.rpartition("@")[0]
    if user_info and not (scheme == "gs" and user_info == "anonymous"):
        raise ValueError(
            "contains credentials, which every run would copy; remove them and set them in the environment "
            "(AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or GOOGLE_APPLICATION_CREDENTIALS)"
        )
    unknown_options = sorted({option for option, _ in parse_qsl(query, keep_blank_values=True)} - set(URI_OPTIONS))
    if unknown_options:
        raise ValueError(f"has the unknown options {unknown_options}; the options are {list(URI_OPTIONS)}")


def _check_local_path(path: Path) -> Path:
    _reject_uri(path_text := str(path))
    if len(path_text) > MAX_PATH_CHARACTERS:
        raise ValueError(f"has {len(path_text):,} characters; a path has at most {MAX_PATH_CHARACTERS:,}")
    _check_path(path_text)
    return path


_URI_START_PATTERN = re.compile(r"[a-z][a-z0-9+.-]+:/", re.IGNORECASE)


def _reject_uri(path: Any) -> Any:
    """Reject a URI. Also reject a path such as s3:/bucket, to which pathlib shortens a URI."""
    if isinstance(path, str) and _URI_START_PATTERN.match(path):
        raise ValueError(f"is {redacted(path)[:80]!r}, but it must be a path on this machine, such as /var/lib/nightjar")
    return path


def _check_flow_name(name: str) -> str:
    if banned_characters := sorted(set(name) & set(PREFECT_BANNED_CHARACTERS)):
        raise ValueError(
            f"is {name[:80]!r}, but Prefect allows none of {' '.join(PREFECT_BANNED_CHARACTERS)} in the name of a deployment; "
            f"remove {' '.join(banned_characters)}"
        )
    return name


def _as_tuple(paths: Any) -> Any:
    return (paths,) if isinstance(paths, str) else paths


OnBadRows = Annotated[
    Literal["fail", "drop"],
    Field(
        description="What happens to a bad row, for example with a null id, an invalid time, a label that is not a number, or "
        "a vector of zeros. With `fail`, the run stops. With `drop`, the row is removed and counted"
    ),
]
MaxBadShare = Annotated[
    float,
    Field(ge=0, le=1, description="Share of bad rows above which the run stops. Used only with `on_bad_rows: drop`"),
]
MaxExpansionRatio = Annotated[
    int,
    OPERATIONAL,
    Field(
        ge=1,
        le=MAX_COUNT,
        description="Largest allowed ratio of the decompressed size of a file to its compressed size. A file that exceeds the "
        "ratio is rejected if its decompressed size is more than 1 GiB",
    ),
]
ColumnName = Annotated[str, Field(min_length=1, max_length=1_000), AfterValidator(_check_control_characters)]
Name = Annotated[
    str, Field(min_length=1, max_length=200), AfterValidator(_check_control_characters), AfterValidator(_check_outer_blanks)
]
PipelineName = Annotated[Name, AfterValidator(_check_flow_name)]
"""The name of a pipeline and of its deployment in Prefect."""
FilePath = Annotated[str, Field(min_length=1, max_length=MAX_PATH_CHARACTERS), AfterValidator(_check_path)]
"""A path, a glob or a URI."""
Folder = Annotated[Path, BeforeValidator(_reject_uri), AfterValidator(_check_local_path)]
"""A folder on this machine."""
LocalFile = Folder
"""A file on this machine, with the same checks as a folder."""
Paths = Annotated[tuple[FilePath, ...], BeforeValidator(_as_tuple)]
"""One path or glob, or a list of them; always a tuple after parsing."""

URI_PATTERN = re.compile(r"([a-z][a-z0-9+.-]*)://([^/?]*)(/.*?|)(?:\?([a-z_]+=[^?]*))?", re.DOTALL | re.IGNORECASE)
"""Scheme, host, path and options of a URI such as s3://bucket/log?region=eu-west-1."""
URI_OPTIONS = ("endpoint_override", "scheme", "region", "project", "retry_limit_seconds", "tls_ca_file_path")
"""Options of an object store in a URI. None of them is a secret."""


def is_uri(location: str) -> bool:
    """Return whether `location` is a URI such as s3://bucket/log, not a path.

    >>> is_uri("s3://bucket/log"), is_uri("log/dt=2026-11-19"), is_uri("/a//b")
    (True, False, False)
    """
    return URI_PATTERN.fullmatch(location) is not None
