"""YAML 1.2 (core schema) with limits on size and nesting.

PyYAML reads YAML 1.1, in which `1:30` is 90, `012` is 10 and `yes` is true. In YAML 1.2, `1:30` is a string, `012` is 12 and
`yes` is a string.
"""

import re
from collections.abc import Hashable
from typing import Any, ClassVar

import yaml
from yaml.nodes import CollectionNode, MappingNode, Node, ScalarNode

MAX_CHARACTERS = 1 << 20
MAX_DEPTH = 32
"""Nesting depth of groups and lists; a config has eight levels."""
MAX_NODES = 20_000
"""Number of keys and values; an alias counts as the nodes that it refers to."""

_TAG_PREFIX = "tag:yaml.org,2002:"
_SCALAR_TYPES = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
}
"""Pattern and possible first characters of each scalar type of the core schema."""


class TooLargeError(Exception):
    """The document exceeds a limit. The message starts with a verb, so the caller can write the document's name before it."""


class _Loader(yaml.SafeLoader):
    """Supports the tags of the core schema only, and rejects duplicate keys."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  the base class declares an instance variable
    yaml_constructors: ClassVar[dict[str | None, Any]] = {}

    def construct_mapping(self, node: MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys: set[Hashable] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise yaml.constructor.ConstructorError(
                    None, None, "a key must be a scalar, not a list or a group", key_node.start_mark
                )
            if key in keys:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is given twice", key_node.start_mark)
            keys.add(key)
        return super().construct_mapping(node, deep=deep)


class _Dumper(yaml.SafeDumper):
    """Quotes a string that YAML 1.1 or 1.2 would read as another type."""


def _construct_bool(_: _Loader, node: ScalarNode) -> bool:
    return str(node.value).lower() == "true"


def _construct_int(_: _Loader, node: ScalarNode) -> int:
    text = str(node.value)
    number_base = {"0o": 8, "0x": 16}.get(text[:2], 10)
    try:
        return int(text, number_base)
    except ValueError as error:  # thousands of digits, or text tagged !!int
        raise yaml.constructor.ConstructorError(None, None, f"not a whole number: {error}", node.start_mark) from None


def _construct_float(_: _Loader, node: ScalarNode) -> float:
    text = str(node.value).lower()
    try:
        return float(text.replace(".inf", "inf").replace(".nan", "nan"))
    except ValueError as error:
        raise yaml.constructor.ConstructorError(None, None, f"not a number: {error}", node.start_mark) from None


for _scalar_type, (_pattern, _first_characters) in _SCALAR_TYPES.items():
    for _yaml_class in (_Loader, _Dumper):
        _yaml_class.add_implicit_resolver(
            f"{_TAG_PREFIX}{_scalar_type}", re.compile(rf"^(?:{_pattern})$(?!\n)"), _first_characters
        )
_Loader.yaml_constructors |= {
    f"{_TAG_PREFIX}null": yaml.SafeLoader.construct_yaml_null,
    f"{_TAG_PREFIX}bool": _construct_bool,
    f"{_TAG_PREFIX}int": _construct_int,
    f"{_TAG_PREFIX}float": _construct_float,
    f"{_TAG_PREFIX}str": yaml.SafeLoader.construct_yaml_str,
    f"{_TAG_PREFIX}seq": yaml.SafeLoader.construct_yaml_seq,
    f"{_TAG_PREFIX}map": yaml.SafeLoader.construct_yaml_map,
}


def load(text: str) -> Any:
    """Parse one YAML document.

    >>> load("{a: 012, b: 1:30, c: yes, d: 1e-3, e: 0o14}")
    {'a': 12, 'b': '1:30', 'c': 'yes', 'd': 0.001, 'e': 12}

    Raises:
        yaml.YAMLError: the text is not YAML of the core schema.
        TooLargeError: the document exceeds a limit.
    """
    if len(text) > MAX_CHARACTERS:
        raise TooLargeError(f"has more than {MAX_CHARACTERS:,} characters; name files by folder or glob")
    _check_limits(text)
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _count_nodes(node, {})
        return loader.construct_document(node)
    finally:
        loader.dispose()


def dump(value: Any, **options: Any) -> str:
    """Format `value` as YAML that both YAML 1.1 and 1.2 read back unchanged; keys keep their order.

    >>> dump({"name": "1e5", "rate": 1e-05, "text": "yes"}).split()
    ['name:', "'1e5'", 'rate:', '1.0e-05', 'text:', "'yes'"]
    """
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False, **options))


def _check_limits(text: str) -> None:
    """Check tags, nesting and number of nodes with the parser.

    The parser is iterative. All later steps are recursive, so a deeply nested document could exceed the stack.
    """
    depth = num_nodes = 0
    for event in yaml.parse(text, Loader=_Loader):
        line_number = event.start_mark.line + 1 if event.start_mark is not None else 0
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        num_nodes += isinstance(event, yaml.NodeEvent)
        if isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent) and event.tag is not None:
            raise yaml.YAMLError(f"line {line_number}: the tag {event.tag!r} is not in the core schema; leave tags out")
        if depth > MAX_DEPTH:
            raise TooLargeError(
                f"nests groups more than {MAX_DEPTH} deep in line {line_number}, but no setting is nested that deep"
            )
        if num_nodes > MAX_NODES:
            raise _too_many_nodes()


def _count_nodes(node: Node, num_nodes_by_id: dict[int, int | None]) -> int:
    """Count `node` and the keys and values below it; an alias counts as the nodes that it refers to.

    Args:
        num_nodes_by_id: number of nodes of each collection by the collection's id; None while the collection is being counted.
    """
    if not isinstance(node, CollectionNode):
        return 1
    if id(node) in num_nodes_by_id:
        num_nodes = num_nodes_by_id[id(node)]
        if num_nodes is None:
            line_number = node.start_mark.line + 1 if node.start_mark is not None else 0
            raise TooLargeError(f"has an alias in line {line_number} for a group that contains the alias; write the group out")
        return num_nodes
    num_nodes_by_id[id(node)] = None
    children = (
        [child for key_and_value in node.value for child in key_and_value] if isinstance(node, MappingNode) else node.value
    )
    num_nodes = 1 + sum(_count_nodes(child, num_nodes_by_id) for child in children)
    if num_nodes > MAX_NODES:
        raise _too_many_nodes()
    num_nodes_by_id[id(node)] = num_nodes
    return num_nodes


def _too_many_nodes() -> TooLargeError:
    return TooLargeError(
        f"has more than {MAX_NODES:,} keys and values, and each use of an alias counts; name files by folder or glob"
    )
