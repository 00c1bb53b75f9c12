"""What is compared: a YAML file of shapes and cases, and the list of cases that it comes to."""

# ruff: noqa: RUF009 (`option` makes a dataclass field)

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from omegaconf import OmegaConf

from pageloom.config.compose import Composer
from pageloom.config.errors import ConfigError, Problem
from pageloom.config.resolvers import register_resolvers
from pageloom.config.rules import SIZE, Rule, at_least, matching, one_of, option, parse_size
from pageloom.config.typed import Place, assign, evaluate, structure
from pageloom.errors import nearest

Phase = Literal["decode", "prefill", "mixed"]

PHASES = ("decode", "prefill", "mixed")
DTYPES = ("float32", "bfloat16", "float16")
PEERS = ("sdpa", "flex")
_REQUIRED = "???"


def _each(rule: Rule, least: int = 1) -> Rule:
    return Rule(
        f"a list, each item {rule.expected}",
        lambda items: len(items) >= least and all(i is None or rule.accepts(i) for i in items),
    )


@dataclass
class Shape:
    """The attention of a model."""

    num_heads: int = option(_REQUIRED, "Query heads.", at_least(1))
    num_kv_heads: int = option(_REQUIRED, "KV heads; divides num_heads.", at_least(1))
    head_size: int = option(_REQUIRED, "Elements of one vector.", at_least(1))
    layers: int = option(_REQUIRED, "Attention layers of the model.", at_least(1))


@dataclass
class Group:
    """Cases that differ in one or several of the lists: all combinations are measured."""

    phase: str = option(_REQUIRED, "What the sequences of the step do.", one_of(*PHASES))
    batch: list[int] = option([1], "Sequences in the step.", _each(at_least(1)))
    context: list[int] = option([1024], "Tokens a sequence attends over.", _each(at_least(1)))
    query: int | None = option(
        None, "Tokens of a prefill in this step; null: all of its context.", at_least(2)
    )
    shapes: list[str] | None = option(None, "Names of shapes; null takes all.")
    dtype: list[str] = option(["bfloat16"], "Of q, k, v and out.", _each(one_of(*DTYPES)))
    quantizer: list[str | None] = option([None], "KV formats; null stores the dtype.")
    block_size: list[int | None] = option(
        [None], "Tokens per block; null leaves it to the backend.", _each(at_least(1))
    )


@dataclass
class Settings:
    """The file's top level."""

    device: str = option(
        "auto", "auto takes a GPU if any.", matching(r"auto|cpu|cuda(:\d+)?", "auto, cpu or cuda")
    )
    rounds: int = option(8, "In each, every backend is timed once.", at_least(1))
    min_time: float = option(
        0.02,
        "Seconds that a sample takes at least.",
        Rule("a number above 0 and at most 10", lambda value: 0 < value <= 10),
    )
    kv_memory: int | str = option("512MiB", "Most memory of one backend's cache.", SIZE)
    seed: int = option(0, "Of the tensors and block tables.", at_least(0))
    num_threads: int | None = option(None, "CPU threads; null leaves it to torch.", at_least(1))
    backends: list[str] | None = option(None, "Only these; null takes all that are registered.")
    peers: list[str] = option([], "Kernels outside Pageloom.", _each(one_of(*PEERS), least=0))
    shapes: dict[str, Any] = option({}, "Shapes by name.")
    cases: list[dict[str, Any]] = option([], "Groups of cases.")


@dataclass(frozen=True, slots=True)
class Case:
    """One thing that every backend is asked to do. Lengths are in tokens.

    In a ``decode`` all sequences bring one token. In a ``prefill`` each brings ``query``, its
    last ones. In a ``mixed`` step, one sequence brings ``query`` tokens and the others decode, at
    contexts spread evenly from ``context / (batch - 1)`` to ``context``.
    """

    phase: Phase
    batch: int
    context: int
    query: int
    shape: str
    num_heads: int
    num_kv_heads: int
    head_size: int
    layers: int  # of the model; fewer are measured if their cache would not fit
    dtype: str
    quantizer: str | None = None
    block_size: int | None = None

    @property
    def id(self) -> str:
        parts = [self.phase, f"batch{self.batch}", f"context{self.context}"]
        if self.phase != "decode" and self.query != self.context:
            parts.append(f"query{self.query}")
        parts += [self.shape, self.dtype]
        if self.quantizer:
            parts.append(self.quantizer)
        if self.block_size:
            parts.append(f"block{self.block_size}")
        return "-".join(parts)

    @property
    def sequences(self) -> list[tuple[int, int]]:
        """``(query tokens, context)`` of each, decodes first."""
        if self.phase == "decode":
            return [(1, self.context)] * self.batch
        if self.phase == "prefill":
            return [(self.query, self.context)] * self.batch
        decodes = self.batch - 1
        lengths = [max(1, self.context * (i + 1) // decodes) for i in range(decodes)]
        return [*((1, length) for length in lengths), (self.query, self.context)]

    @property
    def flop(self) -> float:
        """Of one layer: two products, each of 2 FLOP per query, token that it sees, head and
        element."""
        pairs = sum(n * length - n * (n - 1) // 2 for n, length in self.sequences)
        return 4.0 * pairs * self.num_heads * self.head_size


@dataclass(frozen=True)
class Matrix:
    path: str
    settings: Settings
    cases: list[Case] = field(default_factory=list)

    @property
    def kv_memory(self) -> int:
        """Bytes."""
        return parse_size(self.settings.kv_memory)


def load_matrix(path: str, overrides: Sequence[str] = ()) -> Matrix:
    """Read and check a matrix; ``extends`` and ``overrides`` work as in an engine's configuration.

    Raises `ConfigError` with everything that is wrong.
    """
    composer = Composer()
    composer.add_file(Path(path))
    composer.add_overrides(overrides)
    register_resolvers()
    origins: dict[str, str] = {}

    def place(key: str) -> str:
        while key and key not in origins:
            key = key[: max(key.rfind("."), key.rfind("["), 0)]
        return origins.get(key, path)

    tree, problems = structure(Settings), list(composer.problems)
    for layer in composer.layers:
        origins |= layer.origins
        problems += assign(tree, layer.values, place)
    settings, found = _finish(tree, place, known=problems)
    problems += found
    if problems or settings is None:
        raise ConfigError(problems)
    shapes: dict[str, Shape] = {}
    for name, values in settings.shapes.items():
        shape, found = _section(Shape, values, f"shapes.{name}", place)
        problems += found
        if shape is not None:
            shapes[name] = shape
            problems += _check_shape(name, shape, place)
    cases: list[Case] = []
    for number, values in enumerate(settings.cases):
        key = f"cases[{number}]"
        group, found = _section(Group, values, key, place)
        problems += found
        if group is not None:
            found = list(_check_group(group, settings.shapes, key, place))
            problems += found
            if not found and not problems:
                cases += _expand(group, shapes)
    if not settings.cases:
        problems.append(Problem("cases", path, "there is none", expected="a list of cases"))
    if problems:
        raise ConfigError(problems)
    return Matrix(path, settings, list(dict.fromkeys(cases)))


def _section(schema: type, values: Any, key: str, place: Place) -> tuple[Any | None, list[Problem]]:
    if not isinstance(values, dict):
        return None, [Problem(key, place(key), "", values, "a mapping")]
    tree = structure(schema)
    problems = list(assign(tree, values, place, f"{key}."))
    filled, found = _finish(tree, place, f"{key}.", problems)
    return filled, [*problems, *found]


def _finish(
    tree: Any, place: Place, prefix: str = "", known: Sequence[Problem] = ()
) -> tuple[Any | None, list[Problem]]:
    """The filled dataclass, or None and the problems beside those that are ``known``."""
    keys = {problem.key for problem in known}
    found = [
        problem
        for key, _, problem in evaluate(tree, place, prefix)
        if problem is not None and key not in keys
    ]
    return (None if found or known else OmegaConf.to_object(tree)), found


def _check_shape(name: str, shape: Shape, place: Place) -> Iterator[Problem]:
    key = f"shapes.{name}.num_kv_heads"
    if shape.num_heads % shape.num_kv_heads:
        expected = f"a divisor of num_heads, which is {shape.num_heads}"
        yield Problem(key, place(key), "", shape.num_kv_heads, expected)


def _check_group(group: Group, shapes: Any, key: str, place: Place) -> Iterator[Problem]:
    for name in group.shapes or ():
        if name not in shapes:
            at, expected = f"{key}.shapes", f"some of {', '.join(shapes)}"
            yield Problem(at, place(at), "no such shape", name, expected, nearest(name, shapes))
    if not shapes:
        yield Problem("shapes", place("shapes"), "there is none", expected="a mapping of shapes")
    shortest, at = min(group.context), f"{key}.query"
    if group.phase == "decode" and group.query is not None:
        yield Problem(at, place(at), "a decode brings one token", group.query, "null")
    elif group.query is not None and group.query > shortest:
        yield Problem(at, place(at), "", group.query, f"at most the context, which is {shortest}")
    elif group.phase != "decode" and shortest < 2:
        at = f"{key}.context"
        yield Problem(at, place(at), "a prefill brings 2 tokens or more", shortest)
    if group.phase == "mixed" and min(group.batch) < 2:
        at = f"{key}.batch"
        yield Problem(
            at, place(at), "one prefills, the others decode", min(group.batch), "2 or more"
        )


def _expand(group: Group, shapes: dict[str, Shape]) -> Iterator[Case]:
    for name, dtype, quantizer, block_size, context, batch in itertools.product(
        group.shapes or shapes,
        group.dtype,
        group.quantizer,
        group.block_size,
        group.context,
        group.batch,
    ):
        shape = shapes[name]
        yield Case(
            phase=group.phase,  # type: ignore[arg-type]
            batch=batch,
            context=context,
            query=1 if group.phase == "decode" else group.query or context,
            shape=name,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_size=shape.head_size,
            layers=shape.layers,
            dtype=dtype,
            quantizer=quantizer,
            block_size=block_size,
        )
