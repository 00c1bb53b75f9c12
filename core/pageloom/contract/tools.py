r"""Tool parsers.

A model that was given tools says in its own style which of them it calls. A parser finds the calls
in its text as that comes, and says by a grammar how a call has to look where one is required.

A whole plugin, two files. ``pyproject.toml``::

    [project]
    name = "pageloom-shout"
    version = "0.1"
    dependencies = ["pageloom"]

    [project.entry-points.pageloom]
    shout = "pageloom_shout"

``pageloom_shout.py``::

    import json, re
    from pageloom.contract import CallPiece, ToolParser, hookimpl

    contract_version = "1.1"

    @hookimpl
    def register_tool_parsers(register):
        register("shout", "pageloom_shout:ShoutParser")

    class ShoutParser(ToolParser):
        # An output is text, or one call of a tool that takes a word: CALL weather Paris
        def __init__(self):
            self.said = ""

        @classmethod
        def detect(cls, chat_template):
            return "CALL" in chat_template

        @classmethod
        def grammar(cls, tools, parallel, tokens):
            names = " | ".join(json.dumps(tool["name"]) for tool in tools)
            return f'start: "CALL " ({names}) " " /[a-z]+/'

        def feed(self, text):
            self.said += text
            return []

        def finish(self):
            if not (call := re.fullmatch(r"CALL (\S+) ([a-z]+)", self.said)):
                return [self.said]
            return [CallPiece(0, call[1]), CallPiece(0, None, json.dumps({"word": call[2]}))]

Then ``server: {tool_parser: shout}`` in the YAML.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class CallPiece:
    """What an output adds to one of its calls. New in 1.1."""

    index: int
    """Of the call within the output, from 0 in the order in which they begin."""

    name: str | None = None
    """The function, whole, with a call's first piece only."""

    arguments: str = ""
    """Goes on with the JSON text of the arguments, which is an object."""


class ToolParser(ABC):
    """Finds the calls in the text of one output. Made without arguments, one per output; used by
    one thread. It must not raise, whatever the text is. New in 1.1.

    However the text is cut into pieces, what is returned must be the same when it is put together.
    """

    markers: ClassVar[tuple[str, ...]] = ()
    """Texts that tell calls from other text, as far as a tokenizer may have them as special tokens.
    Where it has one of these, special tokens are no longer left out of the text."""

    @classmethod
    @abstractmethod
    def detect(cls, chat_template: str) -> bool:
        """Whether a model with this chat template surely calls tools in this style.

        ``server.tool_parser: auto`` asks every parser. If several say yes, the operator has to
        choose.
        """

    @classmethod
    @abstractmethod
    def grammar(
        cls, tools: Sequence[Mapping[str, Any]], parallel: bool, tokens: Collection[str]
    ) -> str:
        """What an output looks like that is one call of one of ``tools`` and nothing else, or with
        ``parallel`` one or more; in llguidance's variant of Lark, from its rule ``start``.

        Each tool has ``name``, of ASCII letters, digits, ``_``, ``-`` and ``.``; and
        ``parameters``, the JSON schema of its arguments, an object. The schema may be wrong: it is
        enough to embed it by ``%json``, and the client will be told.
        ``tokens`` are the tokenizer's added tokens. One whose name is like ``<name>`` stands in a
        grammar without quotes, and does not match the same text in quotes.
        """

    @abstractmethod
    def feed(self, text: str) -> Sequence[str | CallPiece]:
        """Take in what comes next. Returns what is sure by now, in order: text that is part of no
        call, and pieces of calls. Text that may still begin a call is kept."""

    @abstractmethod
    def finish(self) -> Sequence[str | CallPiece]:
        """The text has ended, maybe within a call: what was kept."""
