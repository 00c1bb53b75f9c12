"""YAML text -> plain values, the place of every key, and all problems in it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode

from pageloom.config.errors import ABSENT, Problem
from pageloom.errors import shorten

_TAG = "tag:yaml.org,2002:"
_SCALARS = {_TAG + name for name in ("null", "bool", "int", "float", "str")}
_AS_TEXT = {_TAG + name for name in ("timestamp", "value")}  # 2026-01-01 and =
_UNQUOTED = re.compile(r"[\s,:\[{]\$\{")
_DEEPEST = 32
_TOO_DEEP = f"nested more than {_DEEPEST} deep"
_CONTAINERS = {_TAG + "map", _TAG + "seq"}


@dataclass
class Document:
    """What one YAML text says. ``origins`` has the place of every mapping key, by full key."""

    values: Any = None
    origins: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def read_yaml(text: str, place: Callable[[int], str], prefix: str = "") -> Document:
    """Read one document. ``place`` names a line, counted from 1; ``prefix`` is the key of the root.

    Only plain data is accepted: no tag beyond YAML's own scalars, no key twice in a mapping. When
    the text is no YAML at all, ``values`` is None and ``problems`` says why.
    """
    document = Document()
    loader = None
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
    except RecursionError:
        line = loader.line + 1 if loader else 1
        document.problems.append(Problem(prefix, place(line), _TOO_DEEP))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = place(mark.line + 1 if mark else 1)
        said = ", ".join(filter(None, (error.context, error.problem)))
        lines = text.splitlines()[mark.line : mark.line + 1] if mark else []
        expected = 'each "${...}" in quotes' if any(map(_UNQUOTED.search, lines)) else ""
        reason = f"not valid YAML: {said}"
        document.problems.append(Problem(prefix, where, reason, expected=expected))
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        reason = f"not valid YAML: the character {chr(error.character)!r} is not allowed"
        document.problems.append(Problem(prefix, place(line), reason))
    else:
        if node is not None:
            values = _Walk(loader, place, document).value(node, prefix)
            document.values = None if values is ABSENT else values
    return document


class _Walk:
    """Builds the values of a node tree, noting where each key stands.

    What is wrong becomes a problem and `ABSENT`, and is left out of the mapping it stands in.
    """

    def __init__(
        self, loader: yaml.SafeLoader, place: Callable[[int], str], document: Document
    ) -> None:
        self._loader = loader
        self._place = place
        self._document = document
        self._open: list[Node] = []

    def value(self, node: Node, key: str) -> Any:
        if any(node is ancestor for ancestor in self._open):
            return self._problem(node, key, "an alias that contains itself")
        if len(self._open) > _DEEPEST:
            return self._problem(node, key, _TOO_DEEP)
        if isinstance(node, ScalarNode):
            return self._scalar(node, key)
        if node.tag not in _CONTAINERS:
            return self._problem(node, key, f"the YAML tag {node.tag} is not allowed")
        self._open.append(node)
        try:
            if isinstance(node, MappingNode):
                return self._mapping(node, key)
            items = [self.value(item, f"{key}[{i}]") for i, item in enumerate(node.value)]
            return ABSENT if any(item is ABSENT for item in items) else items
        finally:
            self._open.pop()

    def _scalar(self, node: ScalarNode, key: str) -> Any:
        if node.tag in _AS_TEXT:
            return node.value
        if node.tag not in _SCALARS:
            return self._problem(node, key, f"the YAML tag {node.tag} is not allowed")
        try:
            value = self._loader.construct_object(node)
        except (ValueError, KeyError, yaml.YAMLError):
            kind = node.tag.removeprefix(_TAG)
            return self._problem(node, key, f"{shorten(node.value)!r} is no YAML {kind}")
        if isinstance(value, int) and value.bit_length() > 63:
            reason = f"{shorten(node.value)!r} is no integer of 64 bits"
            return self._problem(node, key, reason)
        return value

    def _mapping(self, node: MappingNode, key: str) -> dict[str, Any]:
        seen: dict[str, int] = {}
        for name_node, _ in node.value:
            name, line = name_node.value, name_node.start_mark.line + 1
            if isinstance(name_node, ScalarNode):
                if name in seen:
                    where = f"given twice; it also stands in line {seen[name]}"
                    self._problem(name_node, _join(key, name), where)
                seen[name] = line
        try:
            self._loader.flatten_mapping(node)  # merge keys: <<
        except yaml.MarkedYAMLError as error:
            self._problem(node, key, f"not valid YAML: {error.problem}")
        values = {}
        for name_node, value_node in node.value:
            name = name_node.value
            if not isinstance(name_node, ScalarNode) or name_node.tag != _TAG + "str":
                self._problem(name_node, key, "a key that is not text; put it in quotes")
                continue
            full = _join(key, name)
            self._document.origins[full] = self._place(name_node.start_mark.line + 1)
            value = self.value(value_node, full)
            if value is not ABSENT:
                values[name] = value
        return values

    def _problem(self, node: Node, key: str, reason: str) -> Any:
        where = self._place(node.start_mark.line + 1)
        self._document.problems.append(Problem(key, where, reason))
        return ABSENT


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name
