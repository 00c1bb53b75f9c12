"""Open-loop load: every request is sent when the trace says, however slow the server is."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

from pageloom.bench.http.target import Connection, Outcome, Target
from pageloom.bench.serving.trace import FIRST_TOKEN_ID, Trace, TraceRequest
from pageloom.errors import PageloomError

WARM_UP_PROMPT_TOKENS = 16
WARM_UP_OUTPUT_TOKENS = 8


@dataclass(frozen=True)
class Run:
    """What one server made of a trace."""

    seconds: float  # from the start to the end of the last request
    outcomes: list[Outcome]  # in the order of the trace

    @property
    def succeeded(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if not outcome.error]


Round = dict[str, Run]  # by the target's name, in the order they ran


@dataclass(frozen=True)
class Settings:
    """How requests are sent to every target."""

    timeout: float  # seconds without a byte, after which a request has failed
    ignore_eos: bool  # whether outputs go on to their full length
    warm_up: int  # requests before each turn, which are not measured


async def named(targets: Sequence[Target], model: str | None, settings: Settings) -> list[Target]:
    """The targets with the name of a model: the given one, or the first that each server has.

    Raises `PageloomError` for a server that does not answer.
    """
    found = []
    for target in targets:
        async with _connect(target, settings) as connection:
            found.append(replace(target, model=model or await connection.model()))
    return found


async def run_rounds(
    targets: Sequence[Target],
    traces: Sequence[Trace],
    settings: Settings,
    *,
    on_turn: Callable[[int, Target], None] = lambda number, target: None,
    on_finished: Callable[[], None] = lambda: None,
) -> AsyncIterator[Round]:
    """Yield each round as it ends; ``traces`` has one for each, with prompts that are drawn.

    In a round every target serves the trace once; another one begins in each. Raises
    `PageloomError` if a target cannot even serve the requests that warm it up.
    """
    for number, trace in enumerate(traces):
        first = number % len(targets)
        done = {}
        for target in (*targets[first:], *targets[:first]):
            on_turn(number, target)
            async with _connect(target, settings) as connection:
                await _warm_up(connection, settings.warm_up, seed=number)
                gc.collect()  # what one turn left behind is not for the next to clear away
                gc.freeze()  # nor to be gone through while requests are due
                done[target.name] = await _replay(connection, trace, on_finished)
                gc.unfreeze()
        yield done


async def _replay(connection: Connection, trace: Trace, on_finished: Callable[[], None]) -> Run:
    async def send(request: TraceRequest) -> Outcome:
        outcome = await connection.send(request, start)
        on_finished()
        return outcome

    start = time.monotonic()
    async with asyncio.TaskGroup() as group:
        tasks = []
        for request in trace:
            await asyncio.sleep(max(0.0, start + request.arrival - time.monotonic()))
            tasks.append(group.create_task(send(request)))
    return Run(time.monotonic() - start, [task.result() for task in tasks])


async def _warm_up(connection: Connection, count: int, seed: int) -> None:
    """A few requests whose prompts are in no trace. The ids are such as every vocabulary has."""
    draw = Random(f"{seed} warm-up")
    for _ in range(count):
        prompt = tuple(draw.randrange(FIRST_TOKEN_ID, 256) for _ in range(WARM_UP_PROMPT_TOKENS))
        outcome = await connection.send(TraceRequest(prompt, WARM_UP_OUTPUT_TOKENS))
        if outcome.error:
            raise PageloomError(
                f"{connection.target.url} does not serve a request of {WARM_UP_PROMPT_TOKENS} "
                f"token ids and {WARM_UP_OUTPUT_TOKENS} output tokens: {outcome.error}"
                + (f" ({outcome.detail})" if outcome.detail else "")
            )


def _connect(target: Target, settings: Settings) -> Connection:
    return Connection(target, timeout=settings.timeout, ignore_eos=settings.ignore_eos)
