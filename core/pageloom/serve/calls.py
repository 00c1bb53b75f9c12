"""What a chat makes of tools: what it asks of the engine, and calls out of what comes back."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from pageloom.contract import CallPiece, ToolParser
from pageloom.errors import PageloomError
from pageloom.plugins import Plugins, blame
from pageloom.scheduling import SamplingParams
from pageloom.scheduling.structured import StructuredOutput
from pageloom.serve.errors import APIError
from pageloom.serve.protocol import ChatCompletionRequest
from pageloom.serve.structured import refused
from pageloom.serve.tools import Tool

AUTO = "auto"
ARBITRARY_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "", "parameters": {"type": "object"}},
}


@dataclass(frozen=True)
class ToolStyle:
    """How one model calls tools, by the parser of ``name``."""

    name: str
    parser: type[ToolParser]
    tokens: frozenset[str]  # that were added to the vocabulary
    shows_special_tokens: bool  # whether calls cannot be read without them

    @classmethod
    def of(
        cls, plugins: Plugins, name: str, tokenizer: PreTrainedTokenizerBase | None
    ) -> ToolStyle | None:
        """Of the parser ``name``, or with ``auto`` of the one that knows the chat template; None if
        the template takes no tools or nobody knows it. Raises `PageloomError`."""
        template = tool_template(tokenizer)
        if tokenizer is None or not template:
            return None
        found = _detect(plugins, template) if name == AUTO else name
        if found is None:
            return None
        parser = plugins.get("tool_parser", found)
        added = tokenizer.added_tokens_decoder.values()
        special = {token.content for token in added if token.special}
        return cls(
            found,
            parser,
            frozenset(token.content for token in added),
            not special.isdisjoint(parser.markers),
        )

    def form_of(self, tools: Sequence[Tool], parallel: bool) -> StructuredOutput:
        """Of an output that has to call one of ``tools``. Raises `APIError`."""
        functions = [
            {"name": tool.function.name, "parameters": tool.function.schema_of_arguments}
            for tool in tools
        ]
        with blame("tool_parser", self.name):
            grammar = self.parser.grammar(functions, parallel, self.tokens)
        try:
            return StructuredOutput.grammar(grammar)
        except ValueError as error:
            raise refused("tools", error) from error


def tool_template(tokenizer: PreTrainedTokenizerBase | None) -> str:
    """The chat template for conversations with tools; empty if it would not tell of them."""
    if tokenizer is None or not tokenizer.chat_template:
        return ""
    try:
        template = str(tokenizer.get_chat_template(tools=[ARBITRARY_TOOL]))
    except ValueError:  # there are several templates, and none is for this
        return ""
    return template if "tools" in template else ""


def _detect(plugins: Plugins, template: str) -> str | None:
    found = []
    for name in plugins.names("tool_parser"):
        with blame("tool_parser", name):
            if plugins.get("tool_parser", name).detect(template):
                found.append(name)
    if len(found) > 1:
        raise PageloomError(
            f"the chat template may call tools in the style of {' or '.join(found)}; say which by "
            "server.tool_parser"
        )
    return found[0] if found else None


@dataclass(frozen=True)
class ToolUse:
    """The tools of one chat."""

    style: ToolStyle
    parallel: bool
    required: StructuredOutput | None  # the form of an output that has to be a call

    @classmethod
    def of(cls, style: ToolStyle | None, request: ChatCompletionRequest) -> ToolUse | None:
        """None for a chat without tools. Raises `APIError` for what cannot be."""
        if not request.usable_tools():
            return None
        if style is None:
            raise APIError(
                "this model's chat template takes no tools, or calls them in a style that no "
                "parser knows",
                param="tools",
            )
        wanted, required = request.structured(), request.required_tools()
        if wanted is not None and (required or wanted[1].kind == "json"):
            raise APIError(
                f"{wanted[0]} leaves no room for calls of tools; leave out one of them, or set "
                "tool_choice to none",
                param=wanted[0],
            )
        parallel = request.parallel_tool_calls
        return cls(style, parallel, style.form_of(required, parallel) if required else None)

    def applied_to(self, params: SamplingParams) -> SamplingParams:
        """Raises `APIError` for what a call cannot be required with."""
        changes: dict[str, Any] = {}
        if self.style.shows_special_tokens:
            changes["skip_special_tokens"] = False
        if self.required is not None:
            changes["structured"] = self.required
        try:
            return replace(params, **changes)
        except ValueError as error:
            raise refused("tool_choice", error) from error

    def reader(self, params: SamplingParams) -> CallReader:
        """Of an output with these parameters."""
        stopped = bool(params.stop or params.stop_token_ids)
        return CallReader(self.style.parser(), None if self.parallel else 1, whole_calls=stopped)


@dataclass
class Said:
    """What an output, or a part of it, says. Calls are as they stand in deltas."""

    text: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)

    def message(self) -> dict[str, Any]:
        """All of an output, as a message of the conversation."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text, "refusal": None}
        if self.calls:
            message["content"] = self.text or None
            message["tool_calls"] = _whole_calls(self.calls)
        return message

    def delta(self) -> dict[str, Any]:
        """What a chunk adds to the message."""
        delta: dict[str, Any] = {"content": self.text} if self.text else {}
        return delta | ({"tool_calls": self.calls} if self.calls else {})


class CallReader:
    """Tells calls and text of one output apart."""

    def __init__(self, parser: ToolParser, most: int | None, whole_calls: bool) -> None:
        """``most`` calls are told of, None for all. With ``whole_calls``, only once they are whole:
        what a client asked to stop at may come within one, which nobody could use."""
        self._parser = parser
        self._most = most
        self._whole_calls = whole_calls
        self._kept: list[CallPiece] = []  # of the last call
        self.called = False

    def read(self, text: str, ends: bool, stopped: bool = False) -> Said:
        """Take in what comes next, with ``ends`` the last; ``stopped`` if it is because of what a
        client asked to stop at."""
        pieces = list(self._parser.feed(text))
        if ends:
            pieces += self._parser.finish()
        said = Said("".join(piece for piece in pieces if isinstance(piece, str)))
        for piece in self._due([p for p in pieces if isinstance(p, CallPiece)], ends, stopped):
            if self._most is None or piece.index < self._most:
                self.called = True
                said.calls.append(_delta(piece))
        return said

    def _due(self, pieces: list[CallPiece], ends: bool, stopped: bool) -> list[CallPiece]:
        """What may be told of now."""
        if not self._whole_calls:
            return pieces
        known = self._kept + pieces
        last = max((piece.index for piece in known), default=0)
        self._kept = [piece for piece in known if piece.index == last]
        before = [piece for piece in known if piece.index < last]
        if ends and not (stopped and _is_cut_off(self._kept)):
            return known
        return before


def _is_cut_off(call: Sequence[CallPiece]) -> bool:
    try:
        json.loads("".join(piece.arguments for piece in call))
    except (ValueError, RecursionError):
        return True
    return False


def _delta(piece: CallPiece) -> dict[str, Any]:
    if piece.name is None:
        return {"index": piece.index, "function": {"arguments": piece.arguments}}
    return {
        "index": piece.index,
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": piece.name, "arguments": piece.arguments},
    }


def _whole_calls(deltas: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        if "id" in delta:
            calls[delta["index"]] = {"id": delta["id"], "type": "function"} | {
                "function": dict(delta["function"])
            }
        else:
            calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]
    return list(calls.values())


def calls_for_template(number: int, message: dict[str, Any]) -> list[dict[str, Any]]:
    """The calls of ``messages[number]`` as chat templates take them, with arguments as a value.
    Raises `APIError`."""
    calls = message["tool_calls"]
    if not isinstance(calls, list):
        raise APIError(f"messages[{number}] must have a list of tool_calls", param="messages")
    return [_for_template(f"messages[{number}].tool_calls[{i}]", c) for i, c in enumerate(calls)]


def _parsed(arguments: str) -> dict[str, Any] | str:
    """As they are, if the model has written no object: it may be told so, and has to see it."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _for_template(where: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise APIError(f"{where} must have a function with a name", param="messages")
    arguments = function.get("arguments") or {}
    if not isinstance(arguments, dict | str):
        raise APIError(f"{where} must have arguments that are JSON as a text", param="messages")
    value = _parsed(arguments) if isinstance(arguments, str) else arguments
    return {**call, "function": {**function, "arguments": value}}
