"""The style of Nous Hermes 2 Pro, which Qwen 2.5 and Qwen 3 share.

A call is ``<tool_call>{"name": "f", "arguments": {...}}</tool_call>``, anywhere in the text and any
number of times. The format is described in the model card of NousResearch/Hermes-2-Pro-Mistral-7B.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from pageloom.contract import CallPiece, ToolParser
from pageloom_tools.call import CallReader, call_rules

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(ToolParser):
    """What stands between the tags and is no call is text; what follows a call up to its closing
    tag is dropped, and so is the white space before a call and behind one."""

    markers = (OPEN, CLOSE)

    def __init__(self) -> None:
        self._kept = ""  # what is not read yet
        self._space = ""  # at the end of the text so far
        self._call: CallReader | None = None
        self._opening = ""  # of that call, to give back if it is none
        self._calls = 0
        self._closing = False  # between a call and its closing tag

    @classmethod
    def detect(cls, chat_template: str) -> bool:
        # Qwen 3 Coder has the same tags around something else than JSON.
        return (
            OPEN in chat_template
            and "arguments" in chat_template
            and "<function=" not in (chat_template)
        )

    @classmethod
    def grammar(
        cls, tools: Sequence[Mapping[str, Any]], parallel: bool, tokens: Collection[str]
    ) -> str:
        opening, closing = (tag if tag in tokens else json.dumps(tag) for tag in (OPEN, CLOSE))
        more = r' ("\n" call)*' if parallel else ""
        rules = [f"start: call{more}", rf'call: {opening} "\n" call_json "\n" {closing}']
        return "\n".join([*rules, *call_rules(tools, "arguments")])

    def feed(self, text: str) -> Sequence[str | CallPiece]:
        self._kept += text
        return list(self._read())

    def finish(self) -> Sequence[str | CallPiece]:
        if self._call is not None:
            return [] if self._call.named else [self._opening + self._call.raw]
        if self._closing or (self._calls and not self._kept):
            return []
        return [self._space + self._kept]

    def _read(self) -> Iterator[str | CallPiece]:
        before = None
        while before != (before := (len(self._kept), self._call)):
            yield from self._read_call(self._call) if self._call else self._read_text()

    def _read_call(self, call: CallReader) -> Iterator[str | CallPiece]:
        self._kept = self._kept[call.feed(self._kept) :]
        yield from call.take()
        if not (call.ended or call.broken):
            return
        self._call = None
        if call.named:
            self._calls += 1
            self._closing = True
        else:
            yield self._opening + call.raw

    def _read_text(self) -> Iterator[str]:
        """Up to the next tag, or to what may become one."""
        tags = (OPEN, CLOSE) if self._closing else (OPEN,)
        found = [(at, tag) for tag in tags if (at := self._kept.find(tag)) >= 0]
        at, tag = min(found, default=(len(self._kept) - _overlap(self._kept, tags), ""))
        text, self._kept = self._kept[:at], self._kept[at + len(tag) :]
        if not self._closing:
            said = (self._space + text).rstrip()
            self._space = (self._space + text)[len(said) :]
            if said:
                yield said
        if tag:
            self._closing = False
        if tag == OPEN:
            self._opening, self._space = self._space + OPEN, ""
            self._call = CallReader(self._calls, ["arguments", "parameters"], needs_arguments=False)


def _overlap(text: str, tags: Sequence[str]) -> int:
    """How many characters at the end of ``text`` may be the beginning of a tag."""
    for size in range(min(len(text), max(map(len, tags)) - 1), 0, -1):
        if any(tag.startswith(text[-size:]) for tag in tags):
            return size
    return 0
