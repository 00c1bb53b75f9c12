"""Requests with several outputs, and requests that find their prefix in the cache."""

from __future__ import annotations

import asyncio

import pytest
from seen import Records

from pageloom import AsyncEngine, SamplingParams

PROMPT = "Once upon a time"
LONG = [*range(100, 180)]


@pytest.fixture
def records(engine):
    return Records(engine)


@pytest.fixture(autouse=True)
def _nothing_is_cached(engine):
    engine.reset_prefix_cache()


def test_samples_are_distinct_repeatable_and_prefilled_once(engine, records):
    params = SamplingParams(n=4, seed=7, temperature=1.2, max_tokens=8)
    (output,) = engine.generate(PROMPT, params)
    tokens = [completion.token_ids for completion in output.outputs]
    assert [completion.index for completion in output.outputs] == [0, 1, 2, 3]
    assert len(set(map(tuple, tokens))) == 4
    assert sum(step.prefill_tokens for step in records.steps) == len(output.prompt_token_ids)
    assert sum(step.blocks_copied for step in records.steps) == 3
    assert records.requests[0].output_tokens == sum(map(len, tokens))
    again = engine.generate([PROMPT, "1, 2,"], params)[0]
    assert [completion.token_ids for completion in again.outputs] == tokens
    first = SamplingParams(seed=7, temperature=1.2, max_tokens=8)
    assert engine.generate(PROMPT, first)[0].outputs[0].token_ids == tokens[0]


def test_samples_stream_by_index_and_end_on_their_own(engine):
    params = SamplingParams(n=3, seed=1, max_tokens=12, stop=[" a", " the"], logprobs=1)
    (whole,) = engine.generate(PROMPT, params)
    texts, ends = ["", "", ""], {}
    for chunk in engine.stream(PROMPT, params):
        assert chunk.index not in ends
        texts[chunk.index] += chunk.text
        assert len(chunk.logprobs) == len(chunk.token_ids) == 1
        if chunk.finish_reason:
            ends[chunk.index] = (chunk.finish_reason, chunk.stop_reason)
    assert texts == [completion.text for completion in whole.outputs]
    assert ends == {c.index: (c.finish_reason, c.stop_reason) for c in whole.outputs}
    assert len({len(completion.token_ids) for completion in whole.outputs}) > 1


@pytest.mark.parametrize("params", [{"n": 3}, {"n": 2, "beam_width": 3}])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_every_output_of_an_aborted_request_says_so(engine, params, steps):
    opened = engine.open_request(PROMPT, SamplingParams(max_tokens=20, **params))
    for _ in range(steps):
        engine.advance()
    engine.close(opened)
    reasons = [completion.finish_reason for completion in opened.collect().outputs]
    assert reasons == ["abort"] * params["n"]
    assert engine.planner.pool.num_used == 0


@pytest.mark.parametrize("after", [1, 2, 3, 4, 5])
def test_whoever_receives_a_chunk_may_abort_its_request(engine, after):
    chunks = []

    def deliver(chunk):
        chunks.append(chunk)
        if len(chunks) == after:
            engine.abort("mine")

    params = SamplingParams(n=3, temperature=0, max_tokens=6)
    engine.open_request(PROMPT, params, request_id="mine", deliver=deliver)
    while engine.has_requests:
        engine.advance()
    assert [chunk.finish_reason for chunk in chunks] == [None] * after + ["abort"] * 3
    engine.planner.check_integrity()


def test_an_async_stream_goes_on_until_all_outputs_have_ended(engine):
    params = SamplingParams(n=3, temperature=0, max_tokens=4)
    beams = SamplingParams(n=2, beam_width=3, max_tokens=4)

    async def main():
        async with AsyncEngine(engine) as served:
            return [
                [chunk async for chunk in served.generate(PROMPT, wanted)]
                for wanted in (params, beams)
            ]

    sampled, searched = asyncio.run(main())
    assert sorted(c.index for c in sampled if c.finish_reason) == [0, 1, 2]
    assert len(sampled) == 12
    assert [(c.index, c.finish_reason) for c in searched] == [(0, "length"), (1, "length")]
    assert searched[0].score > searched[1].score


def test_a_beam_search_reports_what_it_returns(engine, records):
    params = SamplingParams(n=2, beam_width=3, max_tokens=4, prompt_logprobs=0)
    (output,) = engine.generate(PROMPT, params)
    (record,) = records.requests
    assert record.output_tokens == sum(len(c.token_ids) for c in output.outputs) == 8
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    for completion in output.outputs:
        assert completion.text == engine.tokenizer.decode(completion.token_ids)


def test_a_prefix_is_computed_once(engine, records):
    params = SamplingParams(temperature=0, max_tokens=4)
    cold = engine.generate([LONG], params)[0]
    warm = engine.generate([LONG], params)[0]
    engine.reset_prefix_cache()
    engine.generate([LONG], params)
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
    assert [record.cached_tokens for record in records.requests] == [0, 64, 0]
    assert [step.prefill_tokens for step in records.steps if step.prefill_tokens] == [80, 16, 80]
    assert records.steps[-1].blocks_cached == 0
    assert engine.planner.pool.num_cached == 5


def test_requests_that_come_together_share_their_prefix(engine, records):
    params = SamplingParams(temperature=0, max_tokens=4)
    together = engine.generate([[*LONG, 7], [*LONG, 8]], params)
    assert sorted(record.cached_tokens for record in records.requests) == [0, 80]
    assert records.steps[0].kv_tokens == 80 + 2
    assert records.steps[0].blocks_used == 5 + 2
    for output in together:
        engine.reset_prefix_cache()
        (alone,) = engine.generate([output.prompt_token_ids], params)
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids


def test_salts_keep_prefixes_apart(engine, records):
    params = SamplingParams(temperature=0, max_tokens=1)
    for salt in ("", "tenant", "other", "tenant"):
        list(engine.stream(LONG, params, cache_salt=salt))
    assert [record.cached_tokens for record in records.requests] == [0, 0, 0, 64]
    with pytest.raises(ValueError, match="cache_salt must be a text, not 5"):
        engine.open_request(LONG, params, cache_salt=5)


def test_nan_is_never_found_in_the_cache(engine, records, monkeypatch):
    params = SamplingParams(temperature=0, max_tokens=1)
    logits = engine.runner.model.logits
    monkeypatch.setattr(engine.runner.model, "logits", lambda hidden: logits(hidden) * float("nan"))
    (failed,) = engine.generate([LONG], params)
    assert failed.outputs[0].finish_reason == "error"
    monkeypatch.undo()
    engine.generate([LONG], params)
    assert [record.cached_tokens for record in records.requests] == [0, 0]


@pytest.mark.parametrize("params", [{}, {"n": 3}, {"beam_width": 2}])
def test_a_receiver_that_raises_harms_nobody_else(engine, params):
    (alone,) = engine.generate(PROMPT, SamplingParams(temperature=0, max_tokens=6))

    def broken(chunk):
        raise RuntimeError("the client has gone")

    bad = engine.open_request("1, 2, 3,", SamplingParams(max_tokens=4, **params), deliver=broken)
    good = engine.open_request(PROMPT, SamplingParams(temperature=0, max_tokens=6))
    while engine.has_requests:
        engine.advance()
    assert bad.finished
    assert good.collect().outputs[0].token_ids == alone.outputs[0].token_ids


def test_an_interrupted_step_ends_every_request_and_the_engine_goes_on(engine, monkeypatch):
    params = SamplingParams(temperature=0, max_tokens=4)
    (alone,) = engine.generate([LONG], params)
    engine.reset_prefix_cache()
    opened = engine.open_request(LONG, params)

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(engine.runner, "run", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.advance()
    assert opened.collect().outputs[0].finish_reason == "error"
    assert engine.generate([LONG], params)[0].outputs[0].token_ids == alone.outputs[0].token_ids


def test_a_priority_beyond_32_bits_is_refused(engine):
    with pytest.raises(ValueError, match="priority must be an integer of 32 bits"):
        engine.open_request(PROMPT, priority=2**31)
