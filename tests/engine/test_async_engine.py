"""Many clients on one engine."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from pageloom import AsyncEngine, SamplingParams
from pageloom.engine.async_engine import EngineClosedError, EngineStepError

GREEDY = SamplingParams(temperature=0, max_tokens=10)
PATIENCE = 120  # seconds, for what takes a moment unless it hangs
PROMPTS = ["The capital of France is", "1, 2, 3, 4,", "def fibonacci(n):", "Once upon a time"]


async def read(engine, prompt, params=GREEDY, **request):
    return [chunk async for chunk in engine.generate(prompt, params, **request)]


def run(engine, scenario):
    """Run a coroutine function on an `AsyncEngine` over ``engine``, for minutes at most."""

    async def main():
        async with AsyncEngine(engine) as served:
            return await asyncio.wait_for(scenario(served), PATIENCE)

    result = asyncio.run(main())
    assert not engine.has_requests
    assert engine.planner.pool.num_used == 0
    return result


def test_concurrent_streams_get_what_they_would_get_alone(engine):
    alone = [engine.generate(prompt, GREEDY)[0].outputs[0].text for prompt in PROMPTS]

    async def scenario(served):
        return await asyncio.gather(*(read(served, prompt) for prompt in PROMPTS))

    streams = run(engine, scenario)
    assert ["".join(chunk.text for chunk in chunks) for chunks in streams] == alone


def test_abort_ends_a_stream(engine):
    async def scenario(served):
        chunks = []
        endless = SamplingParams(ignore_eos=True)
        async for chunk in served.generate(PROMPTS[0], endless, request_id="mine"):
            chunks.append(chunk)
            if len(chunks) == 3:
                await served.abort("mine")
        return chunks

    assert run(engine, scenario)[-1].finish_reason == "abort"


def test_leaving_the_loop_aborts(engine):
    async def scenario(served):
        stream = served.generate(PROMPTS[0], SamplingParams(ignore_eos=True))
        async for _ in stream:
            break
        await stream.aclose()
        await read(served, PROMPTS[1])  # served after the abort
        assert len(engine.planner.running) == 0

    run(engine, scenario)


def test_cancelling_a_task_aborts(engine):
    async def scenario(served):
        task = asyncio.create_task(read(served, PROMPTS[0], SamplingParams(ignore_eos=True)))
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await read(served, PROMPTS[1])
        assert len(engine.planner.running) == 0

    run(engine, scenario)


def test_a_bad_request_fails_alone(engine):
    async def scenario(served):
        good = asyncio.create_task(read(served, PROMPTS[0]))
        with pytest.raises(ValueError, match="empty prompt"):
            await read(served, "")
        return await good

    assert run(engine, scenario)[-1].finish_reason == "length"


def test_a_failing_step_reaches_every_stream_and_the_engine_goes_on(engine, monkeypatch):
    fail = threading.Event()
    forward = engine.runner.model.forward

    def forward_or_fail(*args):
        if fail.is_set():
            raise RuntimeError("out of memory")
        return forward(*args)

    monkeypatch.setattr(engine.runner.model, "forward", forward_or_fail)

    async def scenario(served):
        endless = SamplingParams(ignore_eos=True)
        tasks = [asyncio.create_task(read(served, prompt, endless)) for prompt in PROMPTS]
        await asyncio.sleep(0.3)
        fail.set()
        for task in tasks:
            with pytest.raises(EngineStepError, match="out of memory"):
                await task
        fail.clear()
        return await read(served, PROMPTS[0])

    assert run(engine, scenario)[-1].finish_reason == "length"


def test_shutdown_ends_open_streams_and_refuses_new_ones(engine):
    async def scenario():
        served = AsyncEngine(engine)
        task = asyncio.create_task(read(served, PROMPTS[0], SamplingParams(ignore_eos=True)))
        await asyncio.sleep(0.3)
        await asyncio.to_thread(served.shutdown)
        with pytest.raises(EngineClosedError):
            await asyncio.wait_for(task, PATIENCE)
        with pytest.raises(EngineClosedError):
            await asyncio.wait_for(read(served, PROMPTS[0]), PATIENCE)
        served.shutdown()

    asyncio.run(scenario())
    assert not engine.has_requests


def test_a_loop_that_ended_leaves_no_request_behind(engine):
    served = AsyncEngine(engine)

    async def walk_away():
        stream = served.generate(PROMPTS[0], SamplingParams(ignore_eos=True))
        await anext(stream)

    asyncio.run(walk_away())
    asyncio.run(read(served, PROMPTS[1]))
    served.shutdown()
    assert not engine.has_requests


def test_a_reused_id_is_not_aborted_by_its_former_owner(engine):
    async def scenario(served):
        first = served.generate(PROMPTS[0], GREEDY, request_id="mine")
        async for chunk in first:
            if chunk.finish_reason:
                break
        second = asyncio.create_task(read(served, PROMPTS[1], request_id="mine"))
        await asyncio.sleep(0.1)
        await first.aclose()
        return await second

    assert run(engine, scenario)[-1].finish_reason == "length"


def test_a_dead_engine_thread_leaves_nobody_waiting(engine, monkeypatch):
    def leave(*_):
        raise SystemExit(3)

    async def scenario(served):
        task = asyncio.create_task(read(served, PROMPTS[0], SamplingParams(ignore_eos=True)))
        await asyncio.sleep(0.3)
        monkeypatch.setattr(engine.runner, "run", leave)
        with pytest.raises(EngineClosedError, match="died of SystemExit: 3"):
            await task
        with pytest.raises(EngineClosedError):
            await read(served, PROMPTS[0])

    run(engine, scenario)


def test_prompt_logprobs_come_with_the_first_token(engine):
    asked = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1)

    async def scenario(served):
        return await read(served, PROMPTS[0], asked)

    first, second = run(engine, scenario)
    ids = engine.encode(PROMPTS[0])
    assert [entry and entry.token_id for entry in first.prompt_logprobs] == [None, *ids[1:]]
    assert second.prompt_logprobs is None


def test_an_engine_that_is_never_shut_down_ends_with_its_process():
    script = """
import asyncio
from pageloom import AsyncEngine, SamplingParams

async def walk_away():
    engine = AsyncEngine.from_config("configs/smollm2.yaml", ["kv_cache.memory=64MiB"])
    await anext(engine.generate("Hello", SamplingParams(ignore_eos=True)))
    return engine

engine = asyncio.run(walk_away())
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=2 * PATIENCE
    )
    assert (done.returncode, done.stderr) == (0, "")
