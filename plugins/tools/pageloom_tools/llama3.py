"""The style of Llama 3.1 to 3.3 for tools that a client describes.

The whole output is ``{"name": "f", "parameters": {...}}``, with ``; `` between several, and may
begin with ``<|python_tag|>``. See "JSON based tool calling" in Meta's prompt format of Llama 3.1.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from pageloom.contract import CallPiece
from pageloom_tools.call import SPACE, CallReader, call_rules
from pageloom_tools.json_calls import JSONCallParser

TAG = "<|python_tag|>"


class Llama3Parser(JSONCallParser):
    """An output that does not begin with a call is text, all of it. What follows the last call and
    is neither a separator nor a call is text, too."""

    markers = (TAG,)

    def __init__(self) -> None:
        super().__init__()
        self._plain = False  # whether the rest is text

    @classmethod
    def detect(cls, chat_template: str) -> bool:
        return TAG in chat_template and "parameters" in chat_template

    @classmethod
    def grammar(
        cls, tools: Sequence[Mapping[str, Any]], parallel: bool, tokens: Collection[str]
    ) -> str:
        more = ' ("; " call_json)*' if parallel else ""
        return "\n".join([f"start: call_json{more}", *call_rules(tools, "parameters")])

    def _read(self) -> Iterator[str | CallPiece]:
        while self._kept:
            if self._plain:
                yield self._kept
                self._kept = ""
            elif self._call is not None:
                yield from self._read_call(self._call)
            elif not self._begin():
                return

    def _begin(self) -> bool:
        """Pass over what stands between calls. False if more is needed to know what comes."""
        separators = SPACE + ";," if self._calls else SPACE
        if self._kept[0] in separators:
            self._pass(1)
        elif self._kept.startswith(TAG):
            self._pass(len(TAG))
        elif TAG.startswith(self._kept):
            return False
        elif self._kept[0] == "{":
            self._call = CallReader(self._calls, ["parameters", "arguments"], needs_arguments=True)
        else:
            self._kept, self._passed = self._passed + self._kept, ""
            self._plain = True
        return True

    def _pass(self, size: int) -> None:
        self._passed += self._kept[:size]
        self._kept = self._kept[size:]

    def _ended(self, call: CallReader) -> None:
        self._plain = call.broken

    def _is_left_out(self) -> bool:
        """Separators."""
        return self._calls > 0 and not self._kept
