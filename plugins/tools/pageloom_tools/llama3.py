"""The style of Llama 3.1 to 3.3 for tools that a client describes.

The whole output is ``{"name": "f", "parameters": {...}}``, with ``; `` between several, and may
begin with ``<|python_tag|>``. See "JSON based tool calling" in Meta's prompt format of Llama 3.1.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from pageloom.contract import CallPiece, ToolParser
from pageloom_tools.call import SPACE, CallReader, call_rules

TAG = "<|python_tag|>"


class Llama3Parser(ToolParser):
    """An output that does not begin with a call is text, all of it. What follows the last call and
    is neither a separator nor a call is text, too."""

    markers = (TAG,)

    def __init__(self) -> None:
        self._kept = ""  # what is not read yet
        self._passed = ""  # separators and tags before what comes, to give back if it is no call
        self._call: CallReader | None = None
        self._calls = 0
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

    def feed(self, text: str) -> Sequence[str | CallPiece]:
        self._kept += text
        return list(self._read())

    def finish(self) -> Sequence[str | CallPiece]:
        if self._call is not None:
            return [] if self._call.named else [self._passed + self._call.raw]
        if self._calls and not self._kept:  # nothing but separators
            return []
        return [self._passed + self._kept]

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
            self._give_back("")
        return True

    def _pass(self, size: int) -> None:
        self._passed += self._kept[:size]
        self._kept = self._kept[size:]

    def _read_call(self, call: CallReader) -> Iterator[str | CallPiece]:
        self._kept = self._kept[call.feed(self._kept) :]
        yield from call.take()
        if not (call.ended or call.broken):
            return
        self._call = None
        if call.named:
            self._calls += 1
            self._passed = ""
            self._plain = call.broken
        else:
            self._give_back(call.raw)

    def _give_back(self, raw: str) -> None:
        self._kept, self._passed = self._passed + raw + self._kept, ""
        self._plain = True
