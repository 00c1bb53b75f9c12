"""How long an engine's steps take: what ``pageloom bench profile`` measures, and what stands in
for a model in simulations.

A profile is a JSON file. Its ``costs`` are those of `StepCosts`, its ``worker`` is a
`WorkerReport`; what else it holds says how it was measured and is for people.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pageloom.contract.executor import WorkerReport

FORMAT = "pageloom step profile, version 1"

# What each number of a worker is at least, and what it is below.
_COUNTS, _BYTES = 2**31, 2**63
_RANGES = {
    "vocab_size": (1, _COUNTS),
    "max_model_len": (1, _COUNTS),
    "block_size": (1, _COUNTS),
    "num_blocks": (1, _COUNTS),
    "host_blocks": (0, _COUNTS),
    "bytes_per_block": (0, _BYTES),
    "activations": (0, _BYTES),
}


class StepWork(NamedTuple):
    """What a step has to do, as far as its duration is told from it."""

    tokens: int  # computed
    sequences: int
    draws: int  # next tokens drawn, those of beams included
    decode_context: int
    """Tokens whose keys and values are read by sequences that compute one token."""
    prefill_context: int
    """Likewise by sequences that compute several, each context counted once."""
    prefill_pairs: int
    """Queries times the keys that each attends to, of sequences that compute several."""

    @classmethod
    def of(cls, query_lens: Sequence[int], seq_lens: Sequence[int], draws: int) -> StepWork:
        """From what `Step` says of a step, by sequence."""
        tokens = decode_context = prefill_context = prefill_pairs = 0
        for query, length in zip(query_lens, seq_lens, strict=True):
            tokens += query
            if query == 1:
                decode_context += length
            else:
                prefill_context += length
                prefill_pairs += query * length - query * (query - 1) // 2
        return cls(tokens, len(query_lens), draws, decode_context, prefill_context, prefill_pairs)


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a step as a sum over what it has to do. Nothing takes less than no time.

    The cost of tokens is piecewise linear: what ``tokens`` of the step cost together is
    interpolated between (number of tokens, seconds) points that rise in both, and goes on beyond
    the last as between the last two. Before the first it is the first's.
    """

    constant: float = 0.0
    tokens: Sequence[tuple[int, float]] = ((0, 0.0), (1, 0.0))
    sequence: float = 0.0  # seconds for each of `StepWork.sequences`, and so on
    draw: float = 0.0
    decode_context: float = 0.0
    prefill_context: float = 0.0
    prefill_pair: float = 0.0

    def __post_init__(self) -> None:
        points = self.tokens
        if len(points) < 2 or any(len(point) != 2 for point in points):
            raise ValueError("tokens must be at least two pairs of a number of tokens and seconds")
        for before, after in pairwise(points):
            if not before[0] < after[0] or not before[1] <= after[1]:
                raise ValueError(f"tokens must rise, but {list(after)} follows {list(before)}")
        values = [getattr(self, field.name) for field in fields(self) if field.name != "tokens"]
        if not all(0 <= value < math.inf for value in [*values, points[0][1], points[-1][1]]):
            raise ValueError("each must be 0 or more seconds, and finite")

    def seconds(self, work: StepWork) -> float:
        """How long a step takes."""
        return (
            self.constant
            + self.of_tokens(work.tokens)
            + self.sequence * work.sequences
            + self.draw * work.draws
            + self.decode_context * work.decode_context
            + self.prefill_context * work.prefill_context
            + self.prefill_pair * work.prefill_pairs
        )

    def of_tokens(self, count: int) -> float:
        """The part of a step's duration that is for the number of its tokens alone."""
        points = self.tokens
        if count <= points[0][0]:
            return points[0][1]
        index = min(bisect_right(points, count, key=_number), len(points) - 1)
        (low, start), (high, end) = points[index - 1], points[index]
        return start + (end - start) * (count - low) / (high - low)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> StepCosts:
        """What `as_json` made, or a part of it. Raises `ValueError`."""
        known = {field.name for field in fields(cls)}
        for key, value in values.items():
            if key not in known:
                raise ValueError(f"there is no cost {key!r}; there are {', '.join(sorted(known))}")
            if key != "tokens" and not _is_number(value):
                raise ValueError(f"{key} is {value!r}, but must be a number of seconds")
        given = dict(values)
        if "tokens" in given:
            points = given["tokens"]
            if not isinstance(points, Sequence) or not all(_is_point(point) for point in points):
                raise ValueError("tokens must be a list of pairs: a number of tokens, and seconds")
            given["tokens"] = tuple((count, seconds) for count, seconds in points)
        return cls(**given)


@dataclass(frozen=True)
class StepProfile:
    """One engine's costs, and what its workers said of themselves."""

    costs: StepCosts
    worker: WorkerReport
    measured: Mapping[str, Any]
    """How: the machine, the model, the points and how well the costs fit them. For people."""

    def check_quantizer(self, wanted: str | None, name: str = "the profile") -> None:
        """Raise `ValueError` if the steps were measured with another KV format: a block of another
        takes another number of bytes, and steps another time."""
        measured = self.measured.get("quantizer")
        if measured != wanted:
            raise ValueError(
                f"kv_cache.quantizer is {wanted or 'null'}, but {name} was measured with "
                f"{measured or 'null'}; set it to that, or give a profile that pageloom bench "
                f"profile made with kv_cache.quantizer={wanted or 'null'}"
            )

    def write(self, path: Path) -> None:
        """Raises `OSError`."""
        content = {
            "format": FORMAT,
            "costs": self.costs.as_json(),
            "worker": asdict(self.worker),
            "measured": dict(self.measured),
        }
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: str | Path) -> StepProfile:
        """What `write` wrote. Raises `ValueError` with a sentence that names the file."""
        make = "pageloom bench profile CONFIG --out FILE makes one"
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"the profile {path} cannot be read: {error}; {make}") from error
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError(f"{path} is not a {FORMAT}; {make}")
        try:
            costs = StepCosts.from_json(_part(content, "costs"))
            worker = _worker(_part(content, "worker"))
            measured = _part({"measured": {}} | content, "measured")
        except ValueError as error:
            raise ValueError(f"the profile {path} is wrong: {error}; {make}") from error
        return cls(costs, worker, measured)


def _part(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    if name not in content:
        raise ValueError(f"{name} is missing")
    if not isinstance(content[name], dict):
        raise ValueError(f"{name} must be an object, not {json.dumps(content[name]):.40}")
    part: dict[str, Any] = content[name]
    return part


def _worker(values: Mapping[str, Any]) -> WorkerReport:
    """Raises `ValueError` that names the key."""
    for key in values:
        if key not in {field.name for field in fields(WorkerReport)}:
            raise ValueError(f"worker.{key} is not known")
    try:
        worker = msgspec.convert(values, WorkerReport)
    except msgspec.ValidationError as error:
        reason, _, key = str(error).rstrip("`").partition(" - at `$")
        raise ValueError(f"worker{key}: {reason[0].lower()}{reason[1:]}") from error
    for name, (least, end) in _RANGES.items():
        _check_range(f"worker.{name}", getattr(worker, name), least, end)
    for kind, size in worker.weights.items():
        _check_range(f"worker.weights.{kind}", size, 0, _BYTES)
    return worker


def _check_range(key: str, value: int | None, least: int, end: int) -> None:
    if value is not None and not least <= value < end:
        raise ValueError(f"{key} must be from {least} to {end - 1:,}, not {value}")


def _number(point: tuple[int, float]) -> int:
    return point[0]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_point(value: Any) -> bool:
    return isinstance(value, Sequence) and len(value) == 2 and all(map(_is_number, value))
