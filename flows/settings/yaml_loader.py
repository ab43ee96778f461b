"""YAML 1.2, read and written with ruamel.yaml.

In YAML 1.2, `1:30` is a string, `012` is 12 and `yes` is a string. Dates are read as strings too.
"""

from io import StringIO
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import YAMLError

from recsys_core.errors import InputError, first_line, printable

MAX_DEPTH = 32
"""Largest nesting depth of groups and lists. The settings need far fewer levels."""


class _StringDateConstructor(SafeConstructor):
    """Constructor that reads dates and the scalar `=` as strings."""


for _tag_name in ("timestamp", "value"):
    _StringDateConstructor.add_constructor(f"tag:yaml.org,2002:{_tag_name}", SafeConstructor.construct_yaml_str)

_QUOTE_TEXT = "put a text with special characters in quotes"
_FIX_BY_MESSAGE_PART = {
    r"'\t'": "indent with blanks, not tabs",
    "undefined alias": f"{_QUOTE_TEXT}, such as '*.parquet'",
    "cannot start any token": _QUOTE_TEXT,
    "unknown escape character": f"{_QUOTE_TEXT} with single quotes",
    "mapping values are not allowed": f"write a blank after the colon of a key, align the keys of a group, and {_QUOTE_TEXT}",
    "expected <block end>": "indent the keys of a group equally",
    "unexpected end of stream": "close the quotes, which begin in line {line}",
    "expected ','": "close the bracket, which begins in line {line}",
    "duplicate key": "remove one of the two keys",
}
"""What to do, by a part of the parser's message. {line} is the line in which the quotes or the bracket begin."""


def load(text: str, *, subject: str, fix: str | None = None) -> Any:
    """Parse one YAML document.

    >>> load("{a: 012, b: 1:30, c: yes, d: 1e-3, e: 0o14, f: 2026-11-19}", subject="an example")
    {'a': 12, 'b': '1:30', 'c': 'yes', 'd': 0.001, 'e': 12, 'f': '2026-11-19'}

    Args:
        fix: advice at the end of the error message. The default depends on the error.

    Raises:
        InputError: the text is not YAML, or is nested too deep. The message starts with `subject`.
    """
    yaml = YAML(typ="safe", pure=True)
    yaml.Constructor, yaml.max_depth = _StringDateConstructor, MAX_DEPTH
    try:
        return yaml.load(text)
    except (YAMLError, ValueError) as error:  # int() raises ValueError for a number with thousands of digits
        problem_mark = getattr(error, "problem_mark", None)
        place = "" if problem_mark is None else f"line {problem_mark.line + 1}: "
        problem = printable(getattr(error, "problem", None) or first_line(error), max_characters=200)
        fix_clause = f"; {fix}" if fix else _fix_clause(problem, begin_mark=getattr(error, "context_mark", None))
        raise InputError(f"{subject}: cannot be read as YAML: {place}{problem}{fix_clause}") from None


def _fix_clause(problem: str, *, begin_mark: Any) -> str:
    """Return the clause that suggests a fix; empty if the problem has no entry in _FIX_BY_MESSAGE_PART.

    begin_mark: the parser's mark of the place where the quotes or the bracket begin, or None.
    """
    for message_part, fix in _FIX_BY_MESSAGE_PART.items():
        if message_part in problem:
            return f"; {fix.format(line=begin_mark.line + 1)}" if begin_mark is not None else f"; {fix}"
    return ""


def dump(value: Any, *, is_inline: bool = False) -> str:
    """Format `value` as YAML that `load` reads back unchanged; keys keep their order.

    Args:
        is_inline: write groups in braces and lists in brackets, on one line.

    >>> dump({"name": "1e5", "rate": 1e-05, "date": "2026-11-19"}).split()
    ['name:', "'1e5'", 'rate:', '1e-05', 'date:', "'2026-11-19'"]
    """
    yaml = YAML(typ="safe", pure=True)
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    yaml.default_flow_style = is_inline
    yaml.allow_unicode = False  # some control characters would be read as blanks if they were not escaped
    yaml.width = 1 << 20 if is_inline else None
    stream = StringIO()
    yaml.dump(value, stream)
    return stream.getvalue()
