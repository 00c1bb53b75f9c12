"""Output in float32 depends on the request alone, whatever else runs and however."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pageloom import SamplingParams
from pageloom.contract import Scheduler
from pageloom.engine.stats import EngineStats
from pageloom.memory import blocks_for_branches
from tiny_model import MAX_MODEL_LEN, VOCAB

# Prompts begin alike, so that the prefix cache has something to find.
BEGINNINGS = ([], [5] * 12, [5] * 12 + [7, 8, 9] * 4)


@dataclass(frozen=True)
class Item:
    """A request of a workload."""

    prompt: tuple[int, ...]
    length: int  # most output tokens
    kind: str  # "greedy", "n" or "beams"
    width: int  # branches
    arrival: int = 0  # step
    abort: int | None = None  # step

    @property
    def params(self):
        if self.kind == "beams":
            return SamplingParams(beam_width=self.width, n=self.width, max_tokens=self.length)
        if self.kind == "n":
            return SamplingParams(n=self.width, seed=3, temperature=0.8, max_tokens=self.length)
        return SamplingParams(temperature=0, max_tokens=self.length)

    def blocks(self, block_size):
        """What the pool must have at least."""
        total = min(len(self.prompt) + self.length, MAX_MODEL_LEN)
        return blocks_for_branches(self.width, len(self.prompt), total, block_size)


class Chaos(Scheduler):
    """Runs and preempts at random, in any order, on a whim only so often; the oldest request can
    always make room, in half of the steps before others have run."""

    def __init__(self, seed):
        super().__init__(self.Config())
        self.random = Random(seed)
        self.whims = 15

    def schedule(self, view, plan):
        requests = [*view.running, *view.waiting]
        if not requests:
            return
        oldest = min(requests, key=lambda request: request.arrival_time)
        requests.remove(oldest)
        self.random.shuffle(requests)
        first = self.random.random() < 0.5
        if first:
            self.run_oldest(oldest, requests, plan)
        for request in requests:
            if self.whims and plan.preemptible(request) and self.random.random() < 0.2:
                self.whims -= 1
                plan.preempt(request)
            elif request in view.waiting or plan.preemptible(request):
                plan.run(request)
        if not first:
            self.run_oldest(oldest, requests, plan)

    def run_oldest(self, oldest, requests, plan):
        while not plan.run(oldest) and plan.refusal != "tokens":
            victims = [request for request in requests if plan.preemptible(request)]
            if not victims:
                break
            plan.preempt(victims[-1])


def token_ids(output):
    return [completion.token_ids for completion in output.outputs]


@pytest.fixture(scope="module")
def alone(build):
    """The outputs of a request that runs with nothing beside it, its prompt whole, nothing
    cached."""
    engine = build(
        attention__backend="torch_paged",
        kv_cache__num_blocks=64,
        kv_cache__enable_prefix_caching="false",
    )
    known = {}

    def alone(item):
        key = (item.prompt, item.length, item.kind, item.width)
        if key not in known:
            known[key] = token_ids(engine.generate(list(item.prompt), item.params)[0])
        return known[key]

    return alone


@st.composite
def items(draw):
    tail = draw(st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=16))
    kind = draw(st.sampled_from(["greedy", "greedy", "n", "beams"]))
    arrival = draw(st.integers(0, 12))
    return Item(
        prompt=(*draw(st.sampled_from(BEGINNINGS)), *tail),
        length=draw(st.integers(1, 20)),
        kind=kind,
        width=1 if kind == "greedy" else draw(st.integers(2, 3)),
        arrival=arrival,
        abort=draw(st.none() | st.none() | st.integers(arrival, arrival + 15)),
    )


workloads = st.lists(items(), min_size=1, max_size=8)


def run_workload(engine, workload):
    """Each request arrives and is aborted at its steps; returns the outputs of all, None for
    those that were aborted in time."""
    opened = {}
    step = 0
    while len(opened) < len(workload) or engine.has_requests:
        for number, item in enumerate(workload):
            if item.arrival <= step and number not in opened:
                opened[number] = engine.open_request(list(item.prompt), item.params)
            if item.abort is not None and item.abort <= step and number in opened:
                engine.close(opened[number])
        if engine.has_requests:
            engine.step()
            engine.planner.check_integrity()
        step += 1
    return [
        None if request.request.finish_reason == "abort" else token_ids(request.collect())
        for _, request in sorted(opened.items())
    ]


def check(engine, workload, alone):
    for item, output in zip(workload, run_workload(engine, workload), strict=True):
        assert output in (None, alone(item))
        assert output is not None or item.abort is not None


@settings(max_examples=120)
@given(
    workload=workloads,
    block_size=st.sampled_from([1, 3, 4, 16]),
    spare=st.integers(0, 12),
    budget=st.integers(3, 48),
    seats=st.integers(3, 6),
    chunked=st.booleans(),
    caching=st.booleans(),
    mode=st.sampled_from(["auto", "recompute", "swap"]),
    swap_space=st.sampled_from(["null", "4KiB", "1MiB"]),
    backend=st.sampled_from(["torch_paged", "cpu_paged"]),
    chaos=st.none() | st.integers(0, 1 << 16),
)
def test_with_blocks(
    build,
    alone,
    workload,
    block_size,
    spare,
    budget,
    seats,
    chunked,
    caching,
    mode,
    swap_space,
    backend,
    chaos,
):
    engine = build(
        attention__backend=backend,
        kv_cache__block_size=block_size,
        kv_cache__num_blocks=max(item.blocks(block_size) for item in workload) + spare,
        kv_cache__enable_prefix_caching=str(caching).lower(),
        kv_cache__swap_space=swap_space,
        scheduler__max_num_batched_tokens=budget if chunked else MAX_MODEL_LEN,
        scheduler__max_num_seqs=seats,
        scheduler__enable_chunked_prefill=str(chunked).lower(),
        scheduler__preemption_mode=mode if swap_space != "null" else "recompute",
    )
    if chaos is not None:
        engine.planner.scheduler = Chaos(chaos)
        engine.planner.MAX_PREEMPTIONS_PER_SEAT = 1000  # it may go in circles for a while
    check(engine, workload, alone)


@settings(max_examples=25)
@given(
    workload=workloads,
    slabs=st.integers(3, 5),
    budget=st.integers(3, 48),
    seats=st.integers(3, 6),
)
def test_with_naive_contiguous(build, alone, workload, slabs, budget, seats):
    engine = build(
        attention__backend="naive_contiguous",
        kv_cache__num_blocks=slabs,
        scheduler__max_num_batched_tokens=budget,
        scheduler__max_num_seqs=seats,
    )
    check(engine, workload, alone)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_the_workloads_do_preempt(build, alone, mode):
    """Guards the tests above: small pools must really make requests give way."""
    engine = build(
        attention__backend="torch_paged",
        kv_cache__block_size=4,
        kv_cache__num_blocks=20,
        scheduler__preemption_mode=mode,
    )
    stats = EngineStats()
    engine.plugins.register_observer(stats)
    workload = [Item((5,) * 10 + (n,), 20, kind, 2) for n in range(3) for kind in ("n", "beams")]
    check(engine, workload, alone)
    assert stats.preemptions > 0


def test_a_vocabulary_too_small_for_the_beams_is_refused(build):
    engine = build(attention__backend="torch_paged", kv_cache__num_blocks=64)
    ends = list(range(VOCAB - 2))
    params = SamplingParams(beam_width=3, stop_token_ids=ends, min_tokens=2, max_tokens=5)
    with pytest.raises(ValueError, match="beam_width is 3, but only 2 tokens"):
        engine.open_request([1], params)
