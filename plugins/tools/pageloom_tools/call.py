"""A call as JSON, ``{"name": "f", "arguments": {...}}``: read as it comes, and as a grammar."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pageloom.contract import CallPiece

SPACE = " \t\r\n"
OUTSIDE_STRINGS = frozenset('{}[],:"+-.0123456789eEtrufalsn' + SPACE)
# As ``json.dumps`` and the ``tojson`` of templates write it, which is what models have seen.
LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class CallReader:
    """Reads one call. ``ended`` when it is complete, ``broken`` when it cannot become one.

    The name is given away once the arguments begin. What is in them is not checked: a model that
    writes them wrong has made a call that is wrong.
    """

    def __init__(self, index: int, keys: Iterable[str], needs_arguments: bool) -> None:
        """``keys`` are what the arguments may be called. With ``needs_arguments``, an object that
        has none is no call; otherwise it is one without arguments."""
        self.ended = self.broken = False
        self.named = False  # whether the name was given away
        self._raw: list[str] = []  # what was read until then
        self._index, self._keys, self._needs_arguments = index, frozenset(keys), needs_arguments
        self._expected = "{"
        self._value: _Value | None = None  # the key or value that is being read
        self._key: str | None = None  # of the value that comes, or None
        self._name = ""
        self._begun = False  # the arguments, that is
        self._complete = False
        self._pending: list[str] = []  # what is not given away of them

    @property
    def raw(self) -> str:
        """All that was read, as long as it is not `named`."""
        return "".join(self._raw)

    def feed(self, text: str) -> int:
        """Read on. Returns how many characters are of the call; all, unless it ends within them."""
        for position, char in enumerate(text):
            self._step(char)
            if self.broken:
                return position
            if not self.named:
                self._raw.append(char)
            if self.ended:
                return position + 1
        return len(text)

    def take(self) -> Iterator[CallPiece]:
        """What is new since the last time."""
        if not self._name or not (self._begun or self.ended):
            return
        name = None if self.named else self._name
        if name is not None or self._pending:
            yield CallPiece(self._index, name, "".join(self._pending))
        self.named, self._pending = True, []

    def _step(self, char: str) -> None:
        if self._value is not None:
            self._go_on(self._value, char)
        elif char in SPACE:
            pass
        elif self._expected == "value":
            self._value = _Value(char)
            self.broken = self._value.broken
            if self._is_object(self._value):
                self._begin("{")
        elif self._expected == "key" and char == '"':
            self._value = _Value(char)
        elif self._expected == "," and char == "}":
            self._end()
        elif char == self._expected:
            self._expected = "value" if char == ":" else "key"
        else:
            self.broken = True

    def _go_on(self, value: _Value, char: str) -> None:
        value.step(char)
        if value.broken:
            self.broken = True
            return
        if self._is_object(value) and not value.behind:
            self._pending.append(char)
        if value.complete or value.behind:
            self._value = None
            self._take_in(value)
        if value.behind and not self.broken:
            self._step(char)

    def _is_object(self, value: _Value) -> bool:
        return self._is_arguments and value.text.startswith("{")

    @property
    def _is_arguments(self) -> bool:
        return self._expected == "value" and self._key in self._keys and not self._complete

    def _take_in(self, value: _Value) -> None:
        """A key or a value is complete."""
        if self._expected == "key":
            self._key, self._expected = value.loads(), ":"
        elif self._key == "name" and not self._name:
            name = value.loads()
            self._name = name if isinstance(name, str) else ""
            self.broken = not self._name
            self._expected = ","
        else:
            if self._is_arguments:
                self._complete = True
                self._unwrap(value)
            self._expected = ","

    def _unwrap(self, value: _Value) -> None:
        """Some models write the arguments as a string that holds the object."""
        found = None if value.text.startswith("{") else value.loads()
        if isinstance(found, str) and found.startswith("{"):
            self._begin(found)

    def _begin(self, arguments: str) -> None:
        self._begun, self._pending = True, [arguments]

    def _end(self) -> None:
        if not self._name or (self._needs_arguments and not self._begun):
            self.broken = True
            return
        self.ended = True
        if not self._begun:
            self._begin("{}")


class _Value:
    """Finds the end of a JSON value, whose first character is given."""

    def __init__(self, first: str) -> None:
        self.text = first
        self.complete = False  # with the last character
        self.behind = False  # the last character was no longer part of it
        self.broken = first in "]},:" or first not in OUTSIDE_STRINGS
        self._depth = int(first in "{[")
        self._in_string = first == '"'
        self._escaped = False

    def step(self, char: str) -> None:
        if self._in_string:
            self._step_in_string(char)
        elif self.broken or char not in OUTSIDE_STRINGS:
            self.broken = True
            return
        elif self._depth == 0:
            self.behind = char in ",}]" or char in SPACE
        elif char == '"':
            self._in_string = True
        else:
            self._depth += (char in "{[") - (char in "}]")
            self.complete = self._depth == 0
        if self._depth == 0 and not self.behind:
            self.text += char

    def _step_in_string(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False
            self.complete = self._depth == 0

    def loads(self) -> Any:
        """The value, unless it is an object or a list; None for what is none."""
        try:
            return json.loads(self.text, strict=False)
        except ValueError:
            return None


def call_rules(tools: Sequence[Mapping[str, Any]], key: str) -> list[str]:
    """The rule ``call_json`` in llguidance's variant of Lark, and those that it needs: a call of
    one of ``tools``, whose arguments are called ``key``."""
    rules = [f"call_json: {' | '.join(f'tool_{n}' for n in range(len(tools)))}"]
    for number, tool in enumerate(tools):
        begin = json.dumps(f'{{"name": {json.dumps(tool["name"])}, "{key}": ')
        schema = json.dumps({"type": "object", **tool["parameters"], "x-guidance": LAYOUT})
        rules.append(f'tool_{number}: {begin} %json {schema} "}}"')
    return rules
