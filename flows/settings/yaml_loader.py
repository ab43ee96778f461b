"""YAML 1.2, read and written with ruamel.yaml, with limits on size and nesting.

In YAML 1.2, `1:30` is a string, `012` is 12 and `yes` is a string.
"""

from io import StringIO
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.composer import Composer, ComposerError, MaxDepthExceededError
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import YAMLError
from ruamel.yaml.events import AliasEvent
from ruamel.yaml.nodes import Node, ScalarNode

from recsys_core.errors import InputError, first_line, printable

MAX_CHARACTERS = 1 << 20
MAX_DEPTH = 32
"""Nesting depth of groups and lists; a config has eight levels."""
MAX_NODES = 20_000
"""Number of keys and values; an alias counts as the nodes that it refers to."""
_TAG_PREFIX = "tag:yaml.org,2002:"


class _Composer(Composer):
    """Rejects tags and too many nodes. All nodes are counted before the first alias is expanded."""

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self.warn_double_anchors = False
        self.num_nodes = 0
        self.num_nodes_by_id: dict[int, int] = {}

    def compose_node(self, parent: Any, index: Any) -> Node:
        event, num_nodes_before = self.parser.peek_event(), self.num_nodes
        is_alias = isinstance(event, AliasEvent)
        if not is_alias and event.tag is not None:
            raise ComposerError(
                problem=f"the tag {event.tag} is not in YAML's core schema; leave tags out", problem_mark=event.start_mark
            )
        node: Node = super().compose_node(parent, index)
        if is_alias and id(node) not in self.num_nodes_by_id:
            raise ComposerError(problem="an alias refers to a group that contains the alias", problem_mark=event.start_mark)
        self.num_nodes += self.num_nodes_by_id[id(node)] if is_alias else 1
        self.num_nodes_by_id[id(node)] = self.num_nodes - num_nodes_before
        if self.num_nodes > MAX_NODES:
            raise ComposerError(
                problem=f"more than {MAX_NODES:,} keys and values, and each use of an alias counts; name files by glob",
                problem_mark=event.start_mark,
            )
        return node


class _Constructor(SafeConstructor):
    """Reads what is not in the core schema of YAML 1.2 as strings: dates, 1_000, 0b11, and the keys << and =."""

    def flatten_mapping(self, node: Any) -> None:
        """Leave the merge key << as it is."""


def _construct_int(constructor: _Constructor, node: ScalarNode) -> int | str:
    return (
        str(node.value)
        if "_" in node.value or node.value.lstrip("+-").startswith("0b")
        else constructor.construct_yaml_int(node)
    )


def _construct_float(constructor: _Constructor, node: ScalarNode) -> float | str:
    return str(node.value) if "_" in node.value else constructor.construct_yaml_float(node)


_Constructor.add_constructor(f"{_TAG_PREFIX}int", _construct_int)
_Constructor.add_constructor(f"{_TAG_PREFIX}float", _construct_float)
for _type in ("timestamp", "merge", "value"):
    _Constructor.add_constructor(f"{_TAG_PREFIX}{_type}", SafeConstructor.construct_yaml_str)


def load(text: str, *, subject: str) -> Any:
    """Parse one YAML document.

    >>> load("{a: 012, b: 1:30, c: yes, d: 1e-3, e: 0o14, f: 2026-11-19}", subject="an example")
    {'a': 12, 'b': '1:30', 'c': 'yes', 'd': 0.001, 'e': 12, 'f': '2026-11-19'}

    Raises:
        InputError: the text is not YAML of the core schema, or exceeds a limit. The message starts with `subject`.
    """
    if len(text) > MAX_CHARACTERS:
        raise InputError(f"{subject}: more than {MAX_CHARACTERS:,} characters; name files by folder or glob")
    yaml = YAML(typ="safe", pure=True)
    yaml.Composer = _Composer  # type: ignore[assignment]
    yaml.Constructor, yaml.max_depth = _Constructor, MAX_DEPTH
    try:
        return yaml.load(text)
    except MaxDepthExceededError as error:
        line_number = error.problem_mark.line + 1
        raise InputError(
            f"{subject}: groups are nested more than {MAX_DEPTH} deep in line {line_number}, but no setting is nested that deep"
        ) from None
    except (YAMLError, ValueError) as error:  # int() raises ValueError for a number of thousands of digits
        mark = getattr(error, "problem_mark", None)
        place = "" if mark is None else f"line {mark.line + 1}: "
        problem = printable(getattr(error, "problem", None) or first_line(error), max_characters=200)
        raise InputError(f"{subject}: cannot be read as YAML: {place}{problem}") from None


def dump(value: Any, *, is_inline: bool = False) -> str:
    """Format `value` as YAML that `load` reads back unchanged; keys keep their order.

    Args:
        is_inline: write groups and lists in braces, on one line.

    >>> dump({"name": "1e5", "rate": 1e-05, "date": "2026-11-19"}).split()
    ['name:', "'1e5'", 'rate:', '1e-05', 'date:', "'2026-11-19'"]
    """
    yaml = YAML(typ="safe", pure=True)
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    yaml.default_flow_style = is_inline
    yaml.allow_unicode = False  # unescaped, some control characters would be read as blanks
    yaml.width = 1 << 20 if is_inline else None
    stream = StringIO()
    yaml.dump(value, stream)
    return stream.getvalue()
