"""What becomes of requests, and of replicas, when engines die, on engines that are told when."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pageloom.contract import EngineInfo
from pageloom.engine.outputs import CompletionChunk
from pageloom.scheduling import SamplingParams
from pageloom.serve import replicas as module
from pageloom.serve import restart
from pageloom.serve.client import EngineDiedError, RequestRefusedError
from pageloom.serve.replicas import Replicas
from pageloom.serve.replicas_routing import Router
from pageloom.serve.replicas_scaling import Scaling
from pageloom.serve.wire import Inspection

INFO = EngineInfo("m", "a", "cpu", "float32", "fcfs", "b", None, 4, 100, 1, 1024)
GREEDY = SamplingParams(temperature=0)


class ToldEngine:
    """Has the interface of `EngineClient`. Requests wait until the test says how they go on."""

    def __init__(self, number):
        self.number, self.info, self.vocab_size = number, INFO, 10
        self.died, self.is_alive, self.starts = asyncio.Event(), False, 0
        self.fails_to_start = False
        self.requests = []  # (prompt, queue)
        self.waiting = 0

    @property
    def num_open(self):
        return len(self.requests)

    @property
    def num_waiting(self):
        return self.waiting

    async def start(self):
        self.starts += 1
        if self.fails_to_start:
            raise EngineDiedError("no model")
        self.is_alive = True
        self.died.clear()

    async def generate(self, prompt, params, **options):
        request = (list(prompt), asyncio.Queue())
        self.requests.append(request)
        try:
            while True:
                item = await request[1].get()
                if isinstance(item, Exception):
                    raise item
                yield item
                if item.finish_reason:
                    return
        finally:
            self.requests.remove(request)

    def say(self, *token_ids, finish_reason=None):
        """To the oldest request."""
        chunk = CompletionChunk("r", 0, "", list(token_ids), finish_reason=finish_reason)
        self.requests[0][1].put_nowait(chunk)

    def die(self):
        self.is_alive = False
        for _, queue in self.requests:
            queue.put_nowait(EngineDiedError("the engine process ended"))
        self.died.set()

    async def inspect(self):
        if not self.is_alive:
            raise EngineDiedError("gone")
        text = (
            "# HELP pageloom_steps_total Steps.\n# TYPE pageloom_steps_total counter\n"
            f"pageloom_steps_total {10.0 + self.number}\n"
            "# HELP t_seconds T.\n# TYPE t_seconds histogram\n"
            't_seconds_bucket{le="1.0"} 1.0\nt_seconds_bucket{le="+Inf"} 2.0\n'
            "t_seconds_count 2.0\nt_seconds_sum 3.0\n"
        )
        return Inspection(text.encode(), 2, 1, 5, "")

    async def stop(self):
        self.is_alive = False

    def kill(self):
        self.is_alive = False


def make(least=2, routing="least_loaded", failing=(), **options):
    """Replicas of told engines, and the list that each that is made is added to."""
    made = []

    def one(number):
        made.append(ToldEngine(number))
        made[-1].fails_to_start = number in failing
        return made[-1]

    return Replicas(one, least, Router(routing), **options), made


async def settle():
    """Let everything run that can."""
    for _ in range(20):
        await asyncio.sleep(0)


async def collect(replicas, prompt=(1, 2, 3), params=GREEDY):
    async with aclosing(replicas.generate(list(prompt), params)) as chunks:
        return [token for chunk in [c async for c in chunks] for token in chunk.token_ids]


def drive(test):
    """Run an asynchronous test."""

    def run():
        asyncio.run(test())

    run.__name__ = test.__name__
    return run


@drive
async def test_requests_go_to_the_least_loaded_and_come_back_whole():
    replicas, made = make()
    await replicas.start()
    one, two = made
    asked = [asyncio.create_task(collect(replicas)) for _ in range(4)]
    await settle()
    assert (one.num_open, two.num_open, replicas.num_open) == (2, 2, 4)
    while replicas.num_open:
        for engine in (one, two):
            if engine.requests:
                engine.say(7)
                engine.say(8, finish_reason="stop")
        await settle()
    assert [await task for task in asked] == [[7, 8]] * 4


@drive
async def test_a_second_turn_goes_where_the_first_was_answered():
    replicas, made = make(3, "prefix")
    await replicas.start()
    first = asyncio.create_task(collect(replicas, range(8)))
    await settle()
    (home,) = [engine for engine in made if engine.requests]
    home.say(*range(8, 12))
    home.say(*range(12, 16), finish_reason="stop")
    await first
    busy = [asyncio.create_task(collect(replicas, range(8))) for _ in range(3)]
    await settle()
    assert home.num_open == 3
    second = asyncio.create_task(collect(replicas, range(16)))
    await settle()
    assert home.requests[-1][0] == list(range(16))
    for task in (*busy, second):
        task.cancel()


@drive
async def test_requests_that_wait_move_when_their_engine_dies_and_those_that_run_end():
    replicas, made = make()
    await replicas.start()
    one, two = made
    runs, waits = (asyncio.create_task(collect(replicas)) for _ in range(2))
    await settle()
    assert one.num_open == two.num_open == 1
    one.say(5)
    two.say(5)
    more = [asyncio.create_task(collect(replicas, [number])) for number in range(2)]
    await settle()
    one.die()
    await settle()
    assert [prompt for prompt, _ in two.requests][-2:] in ([[0], [1]], [[1], [0]])
    while two.requests:
        two.say(6, finish_reason="stop")
        await settle()
    ended = await asyncio.gather(runs, waits, return_exceptions=True)
    assert sum(isinstance(each, EngineDiedError) for each in ended) == 1
    assert [await task for task in more] == [[6], [6]]
    assert replicas.is_alive
    assert not replicas.died.is_set()


@drive
async def test_a_request_that_two_engines_have_died_of_is_not_given_to_a_third():
    replicas, made = make(3)
    await replicas.start()
    task = asyncio.create_task(collect(replicas))
    for _ in range(2):
        await settle()
        (engine,) = [engine for engine in made if engine.requests]
        engine.die()
    with pytest.raises(EngineDiedError):
        await task
    assert sum(engine.is_alive for engine in made) == 1


@drive
async def test_what_an_engine_refuses_no_other_is_asked_for():
    replicas, made = make()
    await replicas.start()
    task = asyncio.create_task(collect(replicas))
    await settle()
    (engine,) = [engine for engine in made if engine.requests]
    engine.requests[0][1].put_nowait(RequestRefusedError("too long"))
    with pytest.raises(RequestRefusedError):
        await task
    assert replicas.num_open == 0


@drive
async def test_they_have_died_when_none_is_left():
    replicas, made = make()
    await replicas.start()
    for engine in made:
        assert not replicas.died.is_set()
        engine.die()
        await settle()
    assert replicas.died.is_set()
    assert not replicas.is_alive
    with pytest.raises(EngineDiedError):
        await collect(replicas)
    with pytest.raises(EngineDiedError):
        await replicas.inspect()


def test_an_engine_that_is_to_come_back_does(monkeypatch):
    monkeypatch.setattr(restart, "RESTART_DELAYS", (0.0, 0.0))

    async def run():
        replicas, made = make(restart=True)
        await replicas.start()
        one, two = made
        one.die()
        await settle()
        assert (one.is_alive, one.starts) == (True, 2)
        one.fails_to_start = two.fails_to_start = True
        one.die()
        await settle()
        assert one.starts == 4  # twice more, and then no more
        assert not replicas.died.is_set()
        two.die()
        await settle()
        assert replicas.died.is_set()

    asyncio.run(run())


@drive
async def test_if_one_cannot_be_started_none_is_left():
    replicas, made = make(3, failing=[1])
    with pytest.raises(EngineDiedError, match="no model"):
        await replicas.start()
    assert len(made) == 3
    assert not any(engine.is_alive for engine in made)


def test_their_number_follows_the_queue(monkeypatch):
    monkeypatch.setattr(module, "LOOK", 0.0)

    async def run():
        scaling = Scaling(1, 3, seats=8, up_after=0, down_after=0)
        replicas, made = make(1, scaling=scaling)
        await replicas.start()
        made[0].waiting = 100
        await settle()
        await settle()
        assert [engine.number for engine in made if engine.is_alive] == [0, 1, 2]
        open_ones = [asyncio.create_task(collect(replicas)) for _ in range(3)]
        await settle()
        made[0].waiting = 0
        await settle()
        assert [engine.num_open for engine in made] == [1, 1, 1]
        late = [asyncio.create_task(collect(replicas)) for _ in range(2)]
        await settle()
        assert [engine.num_open for engine in made] == [3, 1, 1]  # two are about to leave
        made[1].say(1, finish_reason="stop")
        await settle()
        assert [engine.is_alive for engine in made] == [True, False, True]
        made[2].say(1, finish_reason="stop")
        await settle()
        assert [engine.is_alive for engine in made] == [True, False, False]
        while made[0].requests:
            made[0].say(1, finish_reason="stop")
            await settle()
        assert [await task for task in (*open_ones, *late)] == [[1]] * 5
        assert not replicas.died.is_set()
        made[0].waiting = 100
        await settle()
        assert [engine.number for engine in made if engine.is_alive] == [0, 1, 2]
        assert len(made) == 5
        await replicas.stop()
        assert not any(engine.is_alive for engine in made)

    asyncio.run(run())


@drive
async def test_metrics_are_those_of_each():
    replicas, _ = make()
    await replicas.start()
    found = await replicas.inspect()
    assert (found.open_requests, found.aborted_requests, found.blocks_used) == (4, 2, 10)
    families = {
        family.name: family
        for family in text_string_to_metric_families(
            (found.metrics + found.live_metrics()).decode()
        )
    }
    steps = {s.labels["replica"]: s.value for s in families["pageloom_steps"].samples}
    assert steps == {"0": 10.0, "1": 11.0}
    assert families["pageloom_steps"].documentation == "Steps."
    buckets = [s for s in families["t_seconds"].samples if s.labels.get("le") == "1.0"]
    assert [s.labels["replica"] for s in buckets] == ["0", "1"]
    assert [s.value for s in families["pageloom_replicas"].samples] == [2.0]
    opened = families["pageloom_replica_open_requests"].samples
    assert [(s.labels["replica"], s.value) for s in opened] == [("0", 2.0), ("1", 2.0)]
