"""Traces: what is asked of an engine, and when. Imports no torch, and knows no model yet."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pageloom.errors import PageloomError, shorten, suggest

# The ids below stand for special tokens in the demo model. (Where they do not, nothing is lost.)
FIRST_TOKEN_ID = 17

KEYS = ("prompt", "prompt_tokens", "output_tokens", "arrival", "user", "priority")
COUNT = "an integer of 1 or more"

Span = tuple[int, int]  # the least and the most


@dataclass(frozen=True, slots=True)
class RandomPrompt:
    """Token ids to be drawn as soon as the vocabulary is known: a shared prefix, then its own."""

    tokens: int  # of its own
    prefix_tokens: int = 0
    prefix_group: int = 0  # prompts of the same group begin with the same prefix


@dataclass(frozen=True, slots=True)
class TraceRequest:
    prompt: str | tuple[int, ...]  # text or token ids
    output_tokens: int
    arrival: float = 0.0  # seconds from the start of the trace
    user: str = ""
    priority: int = 0
    random_prompt: RandomPrompt | None = None  # until it is drawn, `prompt` is empty


Trace = list[TraceRequest]  # in order of arrival


def random_trace(
    requests: int = 64,
    *,
    prompt_tokens: Span = (50, 500),
    output_tokens: Span = (16, 200),
    prefix_tokens: int = 0,
    prefix_groups: int = 1,
    seed: int = 0,
) -> Trace:
    """Requests of uniformly distributed lengths, all there at once.

    The defaults are the trace that all of Pageloom's comparisons use. The lengths depend on
    ``seed`` alone, not on a model. Each prompt begins with the ``prefix_tokens`` of one of
    ``prefix_groups``, in turn; they come on top of ``prompt_tokens``.
    """
    draw = random.Random(f"{seed} lengths")
    return [
        TraceRequest(
            (),
            random_prompt=RandomPrompt(
                draw.randint(*prompt_tokens), prefix_tokens, number % prefix_groups
            ),
            output_tokens=draw.randint(*output_tokens),
        )
        for number in range(requests)
    ]


def with_poisson_arrivals(trace: Trace, rate: float, seed: int = 0) -> Trace:
    """The trace with arrivals of a Poisson process of ``rate`` requests per second."""
    if not (rate > 0 and math.isfinite(rate)):
        raise PageloomError(f"the rate is {rate}, but must be above 0 requests per second")
    draw, now, arriving = random.Random(f"{seed} arrivals"), 0.0, []
    for request in trace:
        now += draw.expovariate(rate)
        arriving.append(replace(request, arrival=now))
    return arriving


def draw_token_ids(trace: Trace, vocab_size: int, seed: int | str = 0) -> Trace:
    """The trace with every `RandomPrompt` drawn: random token ids below ``vocab_size``."""

    def ids(purpose: str, count: int) -> list[int]:
        draw = random.Random(f"{seed} {purpose}")
        low = min(FIRST_TOKEN_ID, vocab_size - 1)
        return [draw.randrange(low, vocab_size) for _ in range(count)]

    drawn = []
    for number, request in enumerate(trace):
        if (wanted := request.random_prompt) is not None:
            prefix = ids(f"prefix {wanted.prefix_group}", wanted.prefix_tokens)
            prompt = (*prefix, *ids(f"prompt {number}", wanted.tokens))
            request = replace(request, prompt=prompt, random_prompt=None)
        drawn.append(request)
    return drawn


def parse_span(text: str, option: str) -> Span:
    """``"50:500"``, or ``"50"`` for exactly that many."""
    low, _, high = text.partition(":")
    try:
        span = int(low), int(high or low)
    except ValueError:
        span = (0, 0)
    if not 1 <= span[0] <= span[1]:
        raise PageloomError(
            f"{option} is {shorten(text)!r}, but must be a number of tokens or LEAST:MOST, such as "
            "50:500"
        )
    return span


def read_trace(path: Path) -> Trace:
    """The trace in a file: a JSON object per line, in any order of arrival.

    ``{"prompt": text or token ids, "output_tokens": 128, "arrival": 0.5, "user": "a",
    "priority": 0}``, or ``"prompt_tokens": 300`` for a prompt of random token ids; the last three
    keys may be left out. Raises `PageloomError`, which names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise PageloomError(f"the trace cannot be read from {path}: {error}") from error
    trace = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                trace.append(_request(line))
            except ValueError as error:
                raise PageloomError(f"{path}, line {number}: {error}") from error
    if not trace:
        raise PageloomError(f"{path} holds no request; give one JSON object per line")
    return sorted(trace, key=lambda request: request.arrival)


def _request(line: str) -> TraceRequest:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(entry, dict):
        raise ValueError(f"must be a JSON object, not {shorten(line.strip())}")
    for key in entry:
        if key not in KEYS:
            raise ValueError(f"unknown key {shorten(key)!r}; {suggest(key, KEYS)}")
    if ("prompt" in entry) == ("prompt_tokens" in entry):
        raise ValueError("needs either prompt or prompt_tokens")
    prompt: str | tuple[int, ...] = ()
    random_prompt = None
    if "prompt" in entry:
        given = _take(entry, "prompt", _is_prompt, "a text or a list of token ids, not empty")
        prompt = given if isinstance(given, str) else tuple(given)
    else:
        random_prompt = RandomPrompt(_take(entry, "prompt_tokens", _is_count, COUNT))
    return TraceRequest(
        prompt,
        _take(entry, "output_tokens", _is_count, COUNT),
        _take(entry, "arrival", _is_time, "seconds, 0 or more", 0.0),
        _take(entry, "user", lambda value: isinstance(value, str), "a text", ""),
        _take(entry, "priority", _is_integer, "an integer", 0),
        random_prompt,
    )


def _take(
    entry: Mapping[str, Any],
    key: str,
    is_right: Callable[[Any], bool],
    wanted: str,
    default: Any = None,
) -> Any:
    if key not in entry and default is not None:
        return default
    if key not in entry:
        raise ValueError(f"{key} is missing; it must be {wanted}")
    if not is_right(entry[key]):
        raise ValueError(f"{key} is {shorten(json.dumps(entry[key]))}, but must be {wanted}")
    return entry[key]


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_integer(value) and value >= 1


def _is_time(value: Any) -> bool:
    return (_is_integer(value) or isinstance(value, float)) and 0 <= value < math.inf


def _is_prompt(value: Any) -> bool:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return bool(value) and all(_is_integer(token_id) and token_id >= 0 for token_id in value)
    return isinstance(value, str) and bool(value)
