"""The style of Nous Hermes 2 Pro, which Qwen 2.5 and Qwen 3 share.

A call is ``<tool_call>{"name": "f", "arguments": {...}}</tool_call>``, anywhere in the text and any
number of times. The format is described in the model card of NousResearch/Hermes-2-Pro-Mistral-7B.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from pageloom.contract import CallPiece
from pageloom_tools.call import CallReader, call_rules
from pageloom_tools.json_calls import JSONCallParser

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(JSONCallParser):
    """What stands between the tags and is no call is text; what follows a call up to its closing
    tag is dropped, and so is the white space before a call and behind one."""

    markers = (OPEN, CLOSE)

    def __init__(self) -> None:
        super().__init__()
        self._closing = False  # between a call and its closing tag

    @classmethod
    def detect(cls, chat_template: str) -> bool:
        # Qwen 3 Coder has the same tags around something else than JSON.
        return (
            OPEN in chat_template
            and "arguments" in chat_template
            and "<function=" not in chat_template
        )

    @classmethod
    def grammar(
        cls, tools: Sequence[Mapping[str, Any]], parallel: bool, tokens: Collection[str]
    ) -> str:
        opening, closing = (tag if tag in tokens else json.dumps(tag) for tag in (OPEN, CLOSE))
        more = r' ("\n" call)*' if parallel else ""
        rules = [f"start: call{more}", rf'call: {opening} "\n" call_json "\n" {closing}']
        return "\n".join([*rules, *call_rules(tools, "arguments")])

    def _read(self) -> Iterator[str | CallPiece]:
        before = None
        while before != (before := (len(self._kept), self._call)):
            yield from self._read_call(self._call) if self._call else self._read_text()

    def _ended(self, call: CallReader) -> None:
        self._closing = call.named

    def _is_left_out(self) -> bool:
        return self._closing or (self._calls > 0 and not self._kept)

    def _read_text(self) -> Iterator[str]:
        """Up to the next tag, or to what may become one. White space at its end is passed over."""
        tags = (OPEN, CLOSE) if self._closing else (OPEN,)
        found = [(at, tag) for tag in tags if (at := self._kept.find(tag)) >= 0]
        at, tag = min(found, default=(len(self._kept) - _overlap(self._kept, tags), ""))
        text, self._kept = self._kept[:at], self._kept[at + len(tag) :]
        if not self._closing:
            said = (self._passed + text).rstrip()
            self._passed = (self._passed + text)[len(said) :]
            if said:
                yield said
        if tag:
            self._closing = False
        if tag == OPEN:
            self._passed += OPEN
            self._call = CallReader(self._calls, ["arguments", "parameters"], needs_arguments=False)


def _overlap(text: str, tags: Sequence[str]) -> int:
    """How many characters at the end of ``text`` may be the beginning of a tag."""
    for size in range(min(len(text), max(map(len, tags)) - 1), 0, -1):
        if any(tag.startswith(text[-size:]) for tag in tags):
            return size
    return 0
