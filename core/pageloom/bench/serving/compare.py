"""The same trace through several engines, turn and turn about."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pageloom.bench.serving.replay import Client, Replay
from pageloom.bench.serving.trace import Trace, TraceRequest, draw_token_ids
from pageloom.config import Config, load_config
from pageloom.engine.engine import Engine
from pageloom.errors import PageloomError

# Enough to run every kernel for prefills, decodes and both in one step.
WARM_UP_REQUESTS = 16
WARM_UP_OUTPUT_TOKENS = 8


@dataclass(frozen=True)
class Side:
    """One of the engines that are compared, kept for all rounds."""

    name: str
    path: str
    config: Config
    client: Client

    @property
    def engine(self) -> Engine:
        return self.client.engine


Round = dict[str, Replay]  # by the side's name, in the order they ran


def build_sides(
    paths: Sequence[str], overrides: Sequence[str], on_build: Callable[[str], None]
) -> list[Side]:
    """An engine for each config, all of them in memory at the same time.

    ``on_build`` is told the name of each before it is built. Raises `PageloomError`, with the
    config at fault.
    """
    configs = [load_config(path, overrides) for path in paths]
    _check_threads(paths, configs)
    sides: list[Side] = []
    for name, path, config in zip(_names(paths), paths, configs, strict=True):
        on_build(name)
        try:
            engine = Engine.from_config(path, overrides)
        except PageloomError as error:
            beside = ", ".join(side.name for side in sides)
            held = f" (beside {beside}, which are in memory already)" if sides else ""
            raise PageloomError(f"{path}: {error}{held}") from error
        sides.append(Side(name, path, config, Client(engine)))
    return sides


def prepare(trace: Trace, sides: Sequence[Side], seed: int) -> Trace:
    """The trace with every prompt as token ids, all of which every side can serve.

    Raises `PageloomError` with the config and the request at fault.
    """
    vocab_size = min(side.engine.vocab_size for side in sides)
    prepared = []
    for number, request in enumerate(draw_token_ids(trace, vocab_size, seed), 1):
        for side in sides:
            try:
                # Texts become ids by the first side's tokenizer: all sides get the same ids.
                request = replace(request, prompt=tuple(side.engine.encode(request.prompt)))
                _check(side.client, request)
            except ValueError as error:
                raise PageloomError(
                    f"{side.path} cannot serve request {number} of the trace: {error}"
                ) from error
        prepared.append(request)
    return prepared


def warm_up(side: Side, trace: Trace) -> None:
    """Run a little of the trace, so that nothing is measured that happens only once."""
    few = [
        replace(request, arrival=0, output_tokens=min(request.output_tokens, WARM_UP_OUTPUT_TOKENS))
        for request in trace[:WARM_UP_REQUESTS]
    ]
    side.client.replay(few)


def run_rounds(
    sides: Sequence[Side],
    trace: Trace,
    rounds: int,
    *,
    keep_prefix_cache: bool = False,
    on_turn: Callable[[int, Side], None] = lambda number, side: None,
    on_finished: Callable[[], None] = lambda: None,
) -> Iterator[Round]:
    """Yield each round as it ends. In a round every side serves the whole trace once; another one
    begins in each. Unless ``keep_prefix_cache``, no turn finds what an earlier one has cached.

    ``on_turn`` is told the round (from 0) and the side before it runs, ``on_finished`` is called
    for every request that finishes.
    """
    for number in range(rounds):
        first = number % len(sides)
        done = {}
        for side in (*sides[first:], *sides[:first]):
            on_turn(number, side)
            if not keep_prefix_cache:
                side.engine.reset_prefix_cache()
            gc.collect()  # what one side left behind is not for the next to clear away
            try:
                done[side.name] = side.client.replay(trace, on_finished)
            except PageloomError as error:
                raise PageloomError(f"{side.path}, round {number + 1}: {error}") from error
        yield done


def _names(paths: Sequence[str]) -> list[str]:
    """The files' names without suffix, or their paths if two are alike; a config that is given
    twice, to see how much two runs of the same differ, gets a number."""
    names = [Path(path).stem for path in paths]
    if len(set(names)) < len(set(paths)):
        names = list(paths)
    seen: Counter[str] = Counter()
    for i, name in enumerate(names):
        seen[name] += 1
        if seen[name] > 1:
            names[i] = f"{name} ({seen[name]})"
    return names


def _check_threads(paths: Sequence[str], configs: Sequence[Config]) -> None:
    wanted = [config.runtime.num_threads for config in configs]
    if len(set(wanted)) > 1:
        listed = ", ".join(
            f"{'null' if threads is None else threads} in {path}"
            for path, threads in zip(paths, wanted, strict=True)
        )
        raise PageloomError(
            f"runtime.num_threads is {listed}, but all engines share the threads of one process; "
            "set it alike, such as with --set runtime.num_threads=2"
        )


def _check(client: Client, request: TraceRequest) -> None:
    """Raise `ValueError` if the engine would refuse the request or cut it short."""
    longest, prompt = client.engine.info.max_model_len, len(request.prompt)
    if prompt + request.output_tokens > longest:
        raise ValueError(
            f"{prompt} prompt and {request.output_tokens} output tokens are more than its "
            f"max_model_len, {longest}"
        )
    # For everything else, the engine itself is asked; nothing is computed.
    client.engine.close(client.open(request, request_id="check"))
