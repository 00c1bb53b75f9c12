"""Time the steps of a real engine, one kind after the other, again and again."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from random import Random

from pageloom.bench.simulate.points import CONTEXTS, DECODES_AFTER, Point, points
from pageloom.contract import StepRecord, WorkerReport, hookimpl
from pageloom.engine.engine import Engine
from pageloom.engine.open_request import OpenRequest
from pageloom.engine.outputs import CompletionChunk
from pageloom.errors import PageloomError
from pageloom.memory import blocks_for
from pageloom.scheduling import SamplingParams

MIN_PASSES = 3
MIN_POINTS = 8
FILL_SHARE = 0.2  # of the time, at most, that filling the cache may take
FILLED_AT_ONCE = 2048  # tokens
POOL_SHARE = 0.8  # of the blocks that a point may hold: policies keep some free

Timings = Mapping[Point, list[float]]  # seconds, in the order in which they were taken


class StepTimer:
    """Makes an engine run the steps of points, and takes their time: from before a step is planned
    until its tokens are delivered.

    Make one per engine: it observes it for good. The engine must be idle whenever it is used.
    """

    def __init__(
        self, engine: Engine, seed: int = 0, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """``clock`` is in seconds."""
        if engine.executor.max_in_flight > 1:
            raise PageloomError(
                "the executor has several steps under way at the same time, so that none has a "
                "duration of its own; profile with parallel.pipeline_parallel_size 1"
            )
        self.engine = engine
        self._clock = clock
        self._random = Random(f"{seed} profile")
        self._salts = 0
        self._last: StepRecord | None = None
        vocab_size = engine.vocab_size
        longest = engine.info.max_model_len
        self._token_ids = [self._random.randrange(vocab_size) for _ in range(longest)]
        engine.plugins.register_observer(self)

    @hookimpl
    def step_finished(self, record: StepRecord) -> None:
        self._last = record

    def fill(self, seconds: float) -> int:
        """Compute prompts until the cache has been written to as far as points may need, or time
        is up and the largest batch in the shortest context has room. Returns how many blocks that
        is; the same ones are taken first afterwards.

        What was never written to may be read faster than any other memory, and may be no number.
        """
        engine, size = self.engine, self.engine.info.block_size
        room = int(engine.info.num_blocks * POOL_SHARE)
        least = min(room, Point(engine.planner.limits.max_num_seqs, CONTEXTS[0]).blocks(size))
        longest = min(engine.info.max_model_len - 1, max(FILLED_AT_ONCE, size))
        longest -= longest % size if longest > size else 0  # no part of a block is left out
        filled, until = 0, time.monotonic() + seconds
        opened: list[OpenRequest] = []
        try:
            while filled < room and (filled < least or time.monotonic() < until):
                longest = min(longest, (room - filled) * size)
                opened.append(self._open(0, longest, most=1 << 30))
                while not opened[-1].request.output_tokens:
                    engine.advance()
                filled += blocks_for(longest, size)
        finally:
            for request in opened:
                engine.close(request)
        engine.reset_prefix_cache()  # what is cached is taken last
        return filled

    def run(self, point: Point) -> dict[Point, list[float]]:
        """Run the step of a point, and the few that follow."""
        opened: list[OpenRequest] = []
        taken: dict[Point, list[float]] = defaultdict(list)
        try:
            for _ in range(point.decodes):
                opened.append(self._open(point.context, 1))
            if point.chunk:
                opened.append(self._open(point.chunk_context, point.chunk))
            kind: Point | None = point
            for _ in range(DECODES_AFTER + 1):
                seconds = self._advance()
                if kind is not None:
                    self._check(kind)
                    taken[kind].append(seconds)
                kind = point.then()
        finally:
            for request in opened:
                self.engine.close(request)
            self.engine.reset_prefix_cache()
        return taken

    def _open(self, computed: int, pending: int, most: int = DECODES_AFTER + 1) -> OpenRequest:
        """A request as it would be after ``computed`` tokens of its prompt, what its blocks hold
        aside."""
        self._salts += 1
        prompt = self._token_ids[: computed + pending]
        room = self.engine.info.max_model_len - len(prompt)
        opened = self.engine.open_request(
            prompt,
            SamplingParams(temperature=0, max_tokens=min(most, room), ignore_eos=True),
            cache_salt=str(self._salts),  # so that nothing of it is found in the cache
            deliver=_discard,
        )
        (branch,) = opened.request.branches
        branch.table.grow(computed)
        branch.num_computed = computed
        return opened

    def _advance(self) -> float:
        start = self._clock()
        self.engine.advance()
        return self._clock() - start

    def _check(self, point: Point) -> None:
        """Raise unless the policy planned the step that was to be timed."""
        record = self._last
        if record is None or record.prefill_tokens + record.decode_tokens != point.tokens:
            done = 0 if record is None else record.prefill_tokens + record.decode_tokens
            raise PageloomError(
                f"policy {self.engine.info.policy} planned a step of {done} tokens where "
                f"{point.tokens} were ready and allowed, so steps cannot be timed by size; profile "
                "with another scheduler.policy, such as fcfs with its default options"
            )


def measure(
    timer: StepTimer,
    seconds: float,
    on_pass: Callable[[str, float], None] = lambda what, share: None,
) -> Timings:
    """Time points for ``seconds``, or longer if that is not enough to time the basic ones
    `MIN_PASSES` times, in another order in each pass. ``on_pass`` is told what is done, and what
    share of the time has passed.

    The first pass takes as many of the points, the basic ones and then others at random, as the
    next passes will have time for. What it measures is left out: much happens in it only once.
    """
    engine, start = timer.engine, time.monotonic()

    def share() -> float:
        return min(1.0, (time.monotonic() - start) / seconds)

    on_pass("filling the cache", 0.0)
    filled = timer.fill(seconds * FILL_SHARE)
    begun, random, todo = share(), Random(0), list[Point]()
    fitting = points(engine.planner.limits, filled)
    order = random.sample(fitting, len(fitting))
    for point in sorted(order, key=lambda point: not point.is_basic):
        on_pass("trying steps", share())
        timer.run(point)
        todo.append(point)
        enough = not point.is_basic and len(todo) >= MIN_POINTS
        if enough and share() - begun > (1 - begun) / (MIN_PASSES + 1):
            break
    if len(todo) < MIN_POINTS:
        raise PageloomError(
            f"only {len(todo)} kinds of steps fit into {filled} blocks of KV cache and the limits "
            "of the scheduler, too few for a profile; give it a larger kv_cache, or more seats"
        )
    timings: dict[Point, list[float]] = defaultdict(list)
    passes = 0
    while passes < MIN_PASSES or share() < 1:
        for point in random.sample(todo, len(todo)):
            for found, taken in timer.run(point).items():
                timings[found] += taken
            on_pass(f"pass {passes + 1}, {len(todo)} kinds of steps", share())
            if passes >= MIN_PASSES and share() >= 1:
                break
        passes += 1
    return timings


def worker_report(engine: Engine) -> WorkerReport:
    """What the engine's workers said of themselves, all ranks together."""
    info, memory = engine.info, engine.memory
    return WorkerReport(
        architecture=info.architecture,
        device=info.device,
        dtype=info.dtype,
        vocab_size=engine.vocab_size,
        max_model_len=info.max_model_len,
        backend=info.backend,
        block_size=info.block_size,
        bytes_per_block=info.bytes_per_block,
        num_blocks=info.num_blocks,
        host_blocks=memory.host_blocks,
        weights=dict(memory.weights),
        activations=memory.activations,
    )


def _discard(chunk: CompletionChunk) -> None: ...
