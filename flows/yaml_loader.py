"""YAML by the core schema of YAML 1.2, of bounded size: no sexagesimal numbers, no octal 012, no `yes` for true.

PyYAML reads YAML 1.1, in which `1:30` is 90, `012` is 10 and `yes` is true.
"""

import re
from collections.abc import Hashable
from typing import Any, ClassVar

import yaml
from yaml.nodes import CollectionNode, MappingNode, Node, ScalarNode

MOST_CHARACTERS = 1 << 20
MOST_DEPTH = 32
"""Groups and lists inside each other; a config has eight."""
MOST_NODES = 20_000
"""Keys and values, those behind aliases counted each time."""

_TAG = "tag:yaml.org,2002:"
_PLAIN = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
}


class TooLargeError(Exception):
    """A document beyond the bounds; the message is the rest of a sentence."""


class _Loader(yaml.SafeLoader):
    """Knows the tags of the core schema alone, and refuses a key that is given twice."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  the base declares it so
    yaml_constructors: ClassVar[dict[str | None, Any]] = {}

    def construct_mapping(self, node: MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise yaml.constructor.ConstructorError(None, None, "a list or a group is no key", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


class _Dumper(yaml.SafeDumper):
    """Quotes a string that YAML 1.1 or 1.2 would read as something else."""


def _construct_bool(_: _Loader, node: ScalarNode) -> bool:
    return str(node.value).lower() == "true"


def _construct_int(_: _Loader, node: ScalarNode) -> int:
    text = str(node.value)
    base = {"0o": 8, "0x": 16}.get(text[:2], 10)
    try:
        return int(text, base)
    except ValueError as error:  # of thousands of digits, or text under !!int
        raise yaml.constructor.ConstructorError(None, None, f"no whole number: {error}", node.start_mark) from None


def _construct_float(_: _Loader, node: ScalarNode) -> float:
    text = str(node.value).lower()
    try:
        return float(text.replace(".inf", "inf").replace(".nan", "nan"))
    except ValueError as error:
        raise yaml.constructor.ConstructorError(None, None, f"no number: {error}", node.start_mark) from None


for _kind, (_pattern, _first) in _PLAIN.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"{_TAG}{_kind}", re.compile(rf"^(?:{_pattern})$(?!\n)"), _first)
_Loader.yaml_constructors |= {
    f"{_TAG}null": yaml.SafeLoader.construct_yaml_null,
    f"{_TAG}bool": _construct_bool,
    f"{_TAG}int": _construct_int,
    f"{_TAG}float": _construct_float,
    f"{_TAG}str": yaml.SafeLoader.construct_yaml_str,
    f"{_TAG}seq": yaml.SafeLoader.construct_yaml_seq,
    f"{_TAG}map": yaml.SafeLoader.construct_yaml_map,
}


def load(text: str) -> Any:
    """The value of one YAML document.

    >>> load("{a: 012, b: 1:30, c: yes, d: 1e-3, e: 0o14}")
    {'a': 12, 'b': '1:30', 'c': 'yes', 'd': 0.001, 'e': 12}

    Raises yaml.YAMLError for what is not YAML of the core schema, and TooLargeError for a document beyond the bounds.
    """
    if len(text) > MOST_CHARACTERS:
        raise TooLargeError(f"has more than {MOST_CHARACTERS:,} characters; name files by folder or glob")
    _require_depth(text)
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _count(node, {})
        return loader.construct_document(node)
    finally:
        loader.dispose()


def dump(value: Any, **options: Any) -> str:
    """`value` as YAML that `load`, and a reader of YAML 1.1, reads back as it is; keys keep their order.

    >>> dump({"name": "1e5", "rate": 1e-05, "text": "yes"}).split()
    ['name:', "'1e5'", 'rate:', '1.0e-05', 'text:', "'yes'"]
    """
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False, **options))


def _require_depth(text: str) -> None:
    """Counts with the parser, which does not call itself; the steps after it do."""
    depth = nodes = 0
    for event in yaml.parse(text, Loader=_Loader):
        line = event.start_mark.line + 1 if event.start_mark is not None else 0
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        nodes += isinstance(event, yaml.NodeEvent)
        if isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent) and event.tag is not None:
            raise yaml.YAMLError(f"line {line}: the tag {event.tag!r} is not of the core schema; leave tags out")
        if depth > MOST_DEPTH:
            raise TooLargeError(f"nests groups more than {MOST_DEPTH} deep in line {line}, and no setting is")
        if nodes > MOST_NODES:
            raise _too_many()


def _count(node: Node, known: dict[int, int | None]) -> int:
    """Keys and values below `node`, itself included, an alias counted as what it stands for."""
    if not isinstance(node, CollectionNode):
        return 1
    if id(node) in known:
        size = known[id(node)]
        if size is None:
            line = node.start_mark.line + 1 if node.start_mark is not None else 0
            raise TooLargeError(f"has an alias in line {line} for a group that holds the alias itself; write the group out")
        return size
    known[id(node)] = None
    children = [part for pair in node.value for part in pair] if isinstance(node, MappingNode) else node.value
    size = 1 + sum(_count(child, known) for child in children)
    if size > MOST_NODES:
        raise _too_many()
    known[id(node)] = size
    return size


def _too_many() -> TooLargeError:
    return TooLargeError(
        f"holds more than {MOST_NODES:,} keys and values, aliases counted each time; name files by folder or glob, and "
        "write fewer"
    )
