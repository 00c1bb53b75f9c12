"""The engine on the real model, through the front door."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pageloom import Engine, SamplingParams
from pageloom.contract import hookimpl
from pageloom.engine.stats import EngineStats
from pageloom.errors import PageloomError
from pageloom.scheduling import PolicyError, RequestTooLargeError
from tiny_model import write_engine, write_model

GREEDY = SamplingParams(temperature=0, max_tokens=12)
PROMPTS = ["The capital of France is", "1, 2, 3, 4,", "def fibonacci(n):"]


def texts(outputs):
    return [output.outputs[0].text for output in outputs]


def test_the_model_answers(engine):
    prompt = engine.render_chat([{"role": "user", "content": "What is the capital of France?"}])
    (output,) = engine.generate(prompt, SamplingParams(temperature=0, max_tokens=40))
    assert output.prompt is None
    assert output.prompt_token_ids == prompt
    assert "Paris" in output.outputs[0].text
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].token_ids[-1] in engine.eos_token_ids


@pytest.mark.parametrize("key", ["parallel.replicas", "parallel.max_replicas"])
def test_replicas_are_for_the_server(tmp_path, caplog, key):
    config = write_engine(tmp_path)
    Engine.from_config(config)
    assert "replicas" not in caplog.text
    Engine.from_config(config, [f"{key}=3"])
    assert "are for 'pageloom serve'" in caplog.text


def test_outputs_come_in_the_order_of_prompts(engine):
    together = texts(engine.generate(PROMPTS, GREEDY))
    assert together == [engine.generate(prompt, GREEDY)[0].outputs[0].text for prompt in PROMPTS]
    assert len(set(together)) == 3


def test_params_may_differ_per_prompt(engine):
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (1, 5, 3)]
    outputs = engine.generate(PROMPTS, params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 5, 3]
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}
    with pytest.raises(ValueError, match="3 prompts but 2 sampling params"):
        engine.generate(PROMPTS, params[:2])


def test_no_prompts_no_outputs(engine):
    assert engine.generate([]) == []


def test_a_stream_gives_what_generate_gives(engine):
    chunks = list(engine.stream(PROMPTS[0], GREEDY))
    (whole,) = engine.generate(PROMPTS[0], GREEDY)
    assert "".join(chunk.text for chunk in chunks) == whole.outputs[0].text
    assert [t for chunk in chunks for t in chunk.token_ids] == whole.outputs[0].token_ids
    assert [chunk.finish_reason for chunk in chunks] == [None] * 11 + ["length"]


def test_two_streams_advance_together(engine):
    alone = texts(engine.generate(PROMPTS[:2], GREEDY))
    first, second = engine.stream(PROMPTS[0], GREEDY), engine.stream(PROMPTS[1], GREEDY)
    parts = ["", ""]
    for one, other in zip(first, second, strict=True):
        parts[0] += one.text
        parts[1] += other.text
    assert parts == alone


def test_closing_a_stream_frees_its_blocks(engine):
    stream = engine.stream(PROMPTS[0], GREEDY)
    next(stream)
    assert engine.planner.pool.num_used > 0
    stream.close()
    assert engine.planner.pool.num_used == 0
    assert not engine.has_requests


def test_an_aborted_request_says_so(engine):
    opened = engine.open_request(PROMPTS[0], GREEDY, request_id="mine")
    engine.step()
    engine.abort("mine")
    output = opened.collect()
    assert output.outputs[0].finish_reason == "abort"
    assert len(output.outputs[0].token_ids) == 1
    engine.abort("mine")


def test_add_request_and_step_give_every_chunk_also_when_others_step(engine):
    names = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS[:2]]
    chunks = engine.step()
    engine.generate(PROMPTS[2], GREEDY)
    engine.abort(engine.add_request(PROMPTS[0], GREEDY, request_id="mine"))
    while engine.has_requests:
        chunks += engine.step()
    chunks += engine.step()
    alone = texts(engine.generate(PROMPTS[:2], GREEDY))
    got = ["".join(chunk.text for chunk in chunks if chunk.request_id == name) for name in names]
    assert got == alone
    assert [c.finish_reason for c in chunks if c.request_id == "mine"] == ["abort"]


def test_a_reused_id_is_not_aborted_by_its_former_owner(engine):
    stream = engine.stream(PROMPTS[0], GREEDY, request_id="mine")
    while not next(stream).finish_reason:
        pass
    opened = engine.open_request(PROMPTS[1], GREEDY, request_id="mine")
    stream.close()
    assert not opened.finished
    engine.abort("mine")
    assert opened.finished


def test_own_ids_step_aside_for_those_of_clients(engine):
    last = int(engine.add_request(PROMPTS[0], GREEDY).removeprefix("request-"))
    engine.add_request(PROMPTS[0], GREEDY, request_id=f"request-{last + 1}")
    assert engine.add_request(PROMPTS[0], GREEDY) == f"request-{last + 2}"
    for number in range(3):
        engine.abort(f"request-{last + number}")
    engine.step()


def test_stop_strings_end_the_text_before_them(engine):
    (whole,) = engine.generate(PROMPTS[1], GREEDY)
    stop = whole.outputs[0].text[5:8]
    params = SamplingParams(temperature=0, max_tokens=12, stop=stop)
    (output,) = engine.generate(PROMPTS[1], params)
    assert output.outputs[0].text == whole.outputs[0].text[: whole.outputs[0].text.index(stop)]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)


def test_a_stop_token_ends_the_output(engine):
    (whole,) = engine.generate(PROMPTS[0], GREEDY)
    ids = whole.outputs[0].token_ids
    at = next(i for i, token in enumerate(ids) if i >= 3 and token not in ids[:i])
    params = SamplingParams(temperature=0, max_tokens=12, stop_token_ids=[ids[at]])
    (output,) = engine.generate(PROMPTS[0], params)
    assert output.outputs[0].token_ids == ids[: at + 1]
    assert output.outputs[0].stop_reason == ids[at]
    assert output.outputs[0].text == engine.tokenizer.decode(ids[:at])


def test_ignore_eos_and_min_tokens(engine):
    prompt = engine.render_chat([{"role": "user", "content": "Say hi."}])
    (short,) = engine.generate(prompt, SamplingParams(temperature=0, max_tokens=60))
    assert short.outputs[0].finish_reason == "stop"
    length = len(short.outputs[0].token_ids)
    ignoring = SamplingParams(temperature=0, max_tokens=length + 9, ignore_eos=True)
    (output,) = engine.generate(prompt, ignoring)
    assert len(output.outputs[0].token_ids) == length + 9
    longer = SamplingParams(temperature=0, max_tokens=length + 9, min_tokens=length + 4)
    (output,) = engine.generate(prompt, longer)
    assert len(output.outputs[0].token_ids) >= length + 4
    assert not engine.eos_token_ids.intersection(output.outputs[0].token_ids[: length + 3])


def test_logprobs_of_output_and_prompt_agree(engine):
    asked = SamplingParams(temperature=0, max_tokens=6, logprobs=3, prompt_logprobs=2)
    (output,) = engine.generate(PROMPTS[0], asked)
    completion = output.outputs[0]
    assert [entry.token_id for entry in completion.logprobs] == completion.token_ids
    assert all(entry.rank == 1 and len(entry.top) == 3 for entry in completion.logprobs)
    assert all(entry.logprob == entry.top[0][1] for entry in completion.logprobs)
    assert output.prompt_logprobs[0] is None
    scored = [entry.token_id for entry in output.prompt_logprobs[1:]]
    assert scored == output.prompt_token_ids[1:]
    # The same tokens as a prompt get the same scores, within bfloat16.
    longer = output.prompt_token_ids + completion.token_ids
    (again,) = engine.generate(longer, SamplingParams(max_tokens=1, prompt_logprobs=0))
    rescored = [entry.logprob for entry in again.prompt_logprobs[-6:]]
    assert rescored == pytest.approx([entry.logprob for entry in completion.logprobs], abs=0.25)


def test_a_seed_repeats_whatever_the_batch(engine):
    params = SamplingParams(seed=7, max_tokens=8)
    (alone,) = engine.generate(PROMPTS[0], params)
    (again,) = engine.generate(PROMPTS[0], params)
    assert again.outputs[0].token_ids == alone.outputs[0].token_ids


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ("", None, "empty prompt"),
        ([0, 49152], None, "prompt token id 49152 is not in the vocabulary of 49152 tokens"),
        ([0, -1], None, "prompt token id -1"),
        ([1] * 8192, None, "a prompt of 8192 tokens, but max_model_len is 8192"),
        ("hi", SamplingParams(logit_bias={60000: 1.0}), "logit_bias names token id 60000"),
        ([1, 2.5], None, "a prompt is text or a list of token ids"),
        ([1, True], None, "True is not a token id"),
        ([[1, "a"]], None, "a prompt is text or a list of token ids"),
        (b"hi", None, "a prompt is text or token ids, not bytes"),
        ("\ud800", None, "not valid Unicode"),
        ("x" * 10**8, None, "has 100,000,000 characters, more than 8192 tokens"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused(engine, prompt, params, message):
    with pytest.raises(ValueError, match=message):
        engine.generate(prompt, params)
    assert not engine.has_requests


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"params": {"temperature": 0}}, "params must be SamplingParams, not dict"),
        ({"priority": "high"}, "priority must be an integer"),
        ({"user": None}, "user must be a text"),
        ({"request_id": ""}, "request_id must be a text that is not empty"),
        ({"request_id": 5}, "request_id must be a text"),
        ({"metadata": 5}, "metadata must be a mapping"),
    ],
)
def test_fields_of_a_request_are_checked(engine, fields, message):
    with pytest.raises(ValueError, match=message):
        engine.open_request("hi", **fields)


def test_arrays_are_token_ids(engine):
    ids = engine.encode(PROMPTS[0])
    (expected,) = texts(engine.generate(ids, GREEDY))
    for given in (np.array(ids), torch.tensor(ids), [np.array(ids)], [np.int64(i) for i in ids]):
        assert texts(engine.generate(given, GREEDY)) == [expected]


def test_if_one_prompt_is_refused_none_runs(engine):
    with pytest.raises(RequestTooLargeError):
        engine.generate([[1, 2], [1] * 9000], GREEDY)
    assert not engine.has_requests


def test_observers_see_every_step_and_request(engine):
    stats = EngineStats()
    engine.plugins.register_observer(stats)
    engine.generate(PROMPTS, GREEDY)
    assert [record.output_tokens for record in stats.requests] == [12, 12, 12]
    assert stats.steps == 12
    assert stats.peak_running == 3
    assert 0 < stats.kv_utilization <= 1
    assert stats.mean_ttft > 0


def test_a_failing_step_ends_every_request_and_the_engine_goes_on(engine, monkeypatch):
    opened = engine.open_request(PROMPTS[0], GREEDY)
    other = engine.open_request(PROMPTS[1], GREEDY)
    engine.step()
    # Not even when ending one of them fails.
    monkeypatch.setattr(opened._detokenizers[0], "finish", lambda: 1 / 0)

    def fail(view, plan):
        raise ZeroDivisionError("oops")

    with monkeypatch.context() as patch:
        patch.setattr(engine.planner.scheduler, "schedule", fail)
        with pytest.raises(PolicyError, match="'fcfs' failed: ZeroDivisionError: oops"):
            engine.step()
    assert opened.collect().outputs[0].finish_reason == "error"
    assert other.collect().outputs[0].finish_reason == "error"
    assert not engine.has_requests
    assert engine.planner.pool.num_used == 0
    assert engine.generate(PROMPTS[0], GREEDY)[0].outputs[0].finish_reason == "length"


def test_a_row_without_a_distribution_ends_only_its_own_request(engine, monkeypatch, caplog):
    expected = texts(engine.generate(PROMPTS[1], GREEDY))
    first = engine.open_request(PROMPTS[0], GREEDY)
    second = engine.open_request(PROMPTS[1], GREEDY)
    logits = engine.runner.model.logits

    def broken(hidden):
        result = logits(hidden)
        result[0] = float("nan")
        return result

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner.model, "logits", broken)
        engine.step()
    assert first.collect().outputs[0].finish_reason == "error"
    assert f"request {first.request.request_id} ends" in caplog.text
    while not second.finished:
        engine.step()
    # A prefill of more tokens comes later in the batch, so row 0 was the first request's.
    assert texts([second.collect()]) == expected


def test_an_observer_may_abort_others(engine):
    class Aborter:
        @hookimpl
        def request_finished(self, record):
            if record.finish_reason == "length":
                for name in [*engine._open]:
                    engine.abort(name)

    aborter = Aborter()
    engine.plugins.register_observer(aborter)
    first, second = (engine.open_request(prompt, GREEDY) for prompt in PROMPTS[:2])
    while engine.has_requests:
        engine.step()
    engine.plugins._manager.unregister(aborter)
    engine.plugins._refresh_observers()
    ended = sorted(r.collect().outputs[0].finish_reason for r in (first, second))
    assert ended == ["abort", "length"]


def test_statistics_see_requests_that_finish_in_their_first_step(engine):
    stats = EngineStats()
    engine.plugins.register_observer(stats)
    engine.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=1))
    assert stats.peak_running == 3
    assert stats.peak_blocks == 3
    assert stats.kv_utilization > 0


def test_an_observer_that_raises_does_not_stop_the_engine(engine, caplog):
    class Broken:
        @hookimpl
        def step_finished(self, record):
            raise RuntimeError("oops")

    engine.plugins.register_observer(Broken())
    assert engine.generate(PROMPTS[0], GREEDY)[0].outputs[0].finish_reason == "length"
    assert caplog.text.count("Broken") == 1


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.max_model_len=9000", "9000, but the model was made for 8192 tokens"),
        ("model.path=/nowhere/model.gguf", "/nowhere/model.gguf does not exist"),
        ("runtime.device=cuda:7", "runtime.device is cuda:7"),
        ("kv_cache.memory=1KiB", "no KV block fits"),
        ("kv_cache.memory=100TiB", "asks for 102,400.0 GiB of KV cache"),
    ],
)
def test_an_engine_that_cannot_be_built_says_why(override, message):
    with pytest.raises(PageloomError, match=message):
        Engine.from_config("configs/smollm2.yaml", [override])


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"max_position_embeddings": 0}, "max_position_embeddings 0, but it must be at least 1"),
        ({"max_position_embeddings": 2**70}, "set model.max_model_len to what is needed"),
        (
            {"vocab_size": 2**31 - 1, "hidden_size": 6 * 2**27, "head_dim": 8},
            "cannot be built on cpu",
        ),
    ],
    ids=["no tokens", "too many tokens", "large embedding"],
)
def test_sizes_that_no_machine_can_hold_are_refused(tmp_path, sizes, message):
    write_model(tmp_path, **sizes)
    path = tmp_path / "engine.yaml"
    path.write_text(f"model: {{path: {tmp_path}, loader: dummy}}\nruntime: {{device: cpu}}\n")
    with pytest.raises(PageloomError, match=rf"(?s){message}"):
        Engine.from_config(path)
