"""Structured output: whatever a random model would say, its text has the form asked for."""

from __future__ import annotations

import json
import re
import string
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pageloom import Engine, SamplingParams
from pageloom.engine import guides
from pageloom.engine.guides import GuideCompiler, MaskThreads
from pageloom.engine.stats import EngineStats
from pageloom.scheduling import GuideError, StructuredOutput
from tiny_model import VOCAB
from tiny_text_model import write_tiny_model

jsonschema_rs = pytest.importorskip("jsonschema_rs")

CALL = {
    "type": "object",
    "properties": {"name": {"enum": ["add", "remove"]}, "number": {"type": "integer"}},
    "required": ["name", "number"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("guided"))


@pytest.fixture(scope="module")
def engine(path):
    return Engine.from_config(path)


def outputs(engine, wanted, prompt="Say:", **params):
    params = {"max_tokens": 200, "temperature": 0.9, "seed": 7, **params}
    return engine.generate(prompt, SamplingParams(structured=wanted, **params))[0].outputs


# -- forms --------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_choice(engine, temperature):
    texts = ["yes", "no", 'a "quoted" one', "ä\n"]
    for seed in range(3):
        (output,) = outputs(
            engine, StructuredOutput.choice(texts), temperature=temperature, seed=seed
        )
        assert output.text in texts
        assert output.finish_reason == "stop"


def test_a_regular_expression_matches_the_whole_output(engine):
    pattern = "[a-c]{3}-(0|[1-9][0-9]{0,3})"
    for output in outputs(engine, StructuredOutput.regex(pattern), n=4):
        assert re.fullmatch(pattern, output.text)


def test_a_grammar(engine):
    grammar = 'start: "(" start ")" | "[" start "]" | "x"'
    for output in outputs(engine, StructuredOutput.grammar(grammar), n=4):
        text = output.text
        while text != "x":
            assert text[0] + text[-1] in ("()", "[]")
            text = text[1:-1]


def test_json_without_a_schema_is_an_object(engine):
    found = [
        output
        for output in outputs(engine, StructuredOutput.json(), n=8, max_tokens=400)
        if output.finish_reason == "stop"
    ]
    assert found
    assert all(isinstance(json.loads(output.text), dict) for output in found)


names = st.text(string.ascii_letters, min_size=1, max_size=4)
leaves = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(
        lambda low, size: {"type": "integer", "minimum": low, "maximum": low + size},
        st.integers(-200, 200),
        st.integers(0, 300),
    ),
    st.builds(
        lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more},
        st.integers(0, 3),
        st.integers(0, 5),
    ),
    st.just({"type": "string", "pattern": "^[a-f]{2,4}$"}),
    st.lists(st.integers(-9, 9) | names | st.none(), min_size=1, max_size=4, unique=True).map(
        lambda values: {"enum": values}
    ),
    names.map(lambda value: {"const": value}),
)


def _object(properties, optional):
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name not in optional],
        "additionalProperties": False,
    }


schemas = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(_object, st.dictionaries(names, inner, max_size=3), st.sets(names, max_size=2)),
        st.builds(
            lambda items, low, more: {
                "type": "array",
                "items": items,
                "minItems": low,
                "maxItems": low + more,
            },
            inner,
            st.integers(0, 2),
            st.integers(0, 2),
        ),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: {"anyOf": parts}),
    ),
    max_leaves=4,
)


@settings(max_examples=60, deadline=None)
@given(
    schema=schemas,
    seed=st.integers(0, 99),
    temperature=st.sampled_from([0, 0.7, 1.0, 2.0]),
    n=st.integers(1, 3),
    min_tokens=st.sampled_from([0, 0, 5, 40]),
    penalty=st.sampled_from([1.0, 1.3]),
)
def test_the_text_always_validates(engine, schema, seed, temperature, n, min_tokens, penalty):
    found = outputs(
        engine,
        StructuredOutput.json(schema),
        seed=seed,
        temperature=temperature,
        n=n,
        min_tokens=min_tokens,
        repetition_penalty=penalty,
        max_tokens=300,
    )
    for output in found:
        assert output.finish_reason in ("stop", "length")
        if output.finish_reason == "stop":
            value = json.loads(output.text)
            assert jsonschema_rs.is_valid(schema, value), (schema, output.text)


# -- beside other fields ------------------------------------------------------------------------


def test_the_output_ends_where_it_is_complete_even_before_min_tokens(engine):
    wanted = StructuredOutput.regex("ab?")
    (output,) = outputs(engine, wanted, min_tokens=50)
    assert output.text == "ab"
    assert output.finish_reason == "stop"
    (output,) = outputs(engine, StructuredOutput.regex("[ab]+"), min_tokens=9)
    assert len(output.text) >= 9


def test_end_of_sequence_comes_only_where_the_text_is_complete(engine):
    """Even if the model wants nothing else."""
    bias = dict.fromkeys(engine.eos_token_ids, 100.0)
    (output,) = outputs(engine, StructuredOutput.regex("a{3,}"), logit_bias=bias)
    assert output.text == "aaa"
    assert output.token_ids[-1] in engine.eos_token_ids


def test_a_text_that_is_cut_off_says_so(engine):
    (output,) = outputs(engine, StructuredOutput.regex("a{50}"), max_tokens=20)
    assert (output.text, output.finish_reason) == ("a" * 20, "length")


def test_stop_strings_end_it_too(engine):
    (output,) = outputs(engine, StructuredOutput.regex("abcdef"), stop="d")
    assert (output.text, output.stop_reason) == ("abc", "d")


def test_log_probabilities_are_those_of_the_model(engine):
    """The same tokens, as a prompt, have the same."""
    prompt = engine.encode("Say:")
    (output,) = outputs(engine, StructuredOutput.choice(["no", "yes"]), prompt=prompt, logprobs=2)
    scored = engine.generate(
        [*prompt, *output.token_ids], SamplingParams(max_tokens=1, prompt_logprobs=2)
    )[0]
    expected = scored.prompt_logprobs[len(prompt) :]
    for got, wanted in zip(output.logprobs, expected, strict=True):
        assert got.logprob == pytest.approx(wanted.logprob, abs=1e-4)
        assert [token for token, _ in got.top] == [token for token, _ in wanted.top]


def test_neighbours_in_a_batch_are_not_constrained(engine):
    free = SamplingParams(temperature=0, max_tokens=12)
    alone = engine.generate("Say:", free)[0].outputs[0].token_ids
    guided = SamplingParams(temperature=0, structured=StructuredOutput.choice(["yes", "no"]))
    mixed = engine.generate(["Say:", "Say:", "Say:"], [free, guided, free])
    assert [mixed[i].outputs[0].token_ids for i in (0, 2)] == [alone, alone]
    assert mixed[1].outputs[0].text in ("yes", "no")


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preemption_changes_nothing(path, engine, mode):
    """Nor do a prefix cache and chunked prefill."""
    small = Engine.from_config(
        path,
        [
            *(
                "kv_cache.memory=null",
                "kv_cache.block_size=4",
                "kv_cache.num_blocks=44",
                "kv_cache.swap_space=1MiB",
            ),
            *("scheduler.max_num_batched_tokens=7", f"scheduler.preemption_mode={mode}"),
        ],
    )
    stats = EngineStats()
    small.plugins.register_observer(stats)
    wanted = StructuredOutput.json({"type": "array", "items": CALL, "minItems": 2, "maxItems": 2})
    prompts = [f"Say these words number {number}" for number in range(4)]
    params = [
        SamplingParams(structured=wanted, seed=5, n=1 + i % 2, max_tokens=60) for i in range(4)
    ]

    def texts(on):
        return [[o.text for o in out.outputs] for out in on.generate(prompts, params)]

    assert texts(small) == texts(engine)
    assert texts(small) == texts(engine)  # with the prompts in the cache
    assert stats.preemptions > 0


# -- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (StructuredOutput.regex("("), "a regex that cannot be used: .*unclosed group"),
        (StructuredOutput.regex("(?=a)b"), "look-around"),
        (StructuredOutput.json("{"), "a json that cannot be used"),
        (StructuredOutput.json({"type": "foo"}), "Invalid type: foo"),
        (StructuredOutput.json({"type": "string", "minLength": 3, "maxLength": 1}), "minLength"),
        (StructuredOutput.grammar("start: ("), "a grammar that cannot be used"),
        (StructuredOutput.grammar('other: "a"'), "no start rule"),
    ],
)
def test_what_cannot_be_compiled_is_refused(engine, wanted, message):
    with pytest.raises(ValueError, match=message):
        engine.open_request("x", SamplingParams(structured=wanted))
    assert not engine.has_requests


def test_a_model_without_a_tokenizer_refuses(build):
    engine = build(attention__backend="torch_paged")
    with pytest.raises(ValueError, match="needs a tokenizer, and this model has none"):
        engine.open_request([1], SamplingParams(structured=StructuredOutput.json()))


def test_a_grammar_that_fails_later_ends_its_request_alone(engine, caplog):
    free = SamplingParams(temperature=0, max_tokens=20)
    alone = engine.generate("Say:", free)[0].outputs[0].token_ids
    hard = StructuredOutput.regex("abcde(a|aa|aaa){500}")
    results = engine.generate(
        ["Say:", "Say:"], [free, SamplingParams(structured=hard, max_tokens=500)]
    )
    assert results[0].outputs[0].token_ids == alone
    assert results[1].outputs[0].finish_reason == "error"
    assert "no token can be drawn by its grammar" in caplog.text
    with pytest.raises(ValueError, match="structured has a regex that was given up"):
        engine.open_request("x", SamplingParams(structured=hard))


# -- any guide ----------------------------------------------------------------------------------


class Countdown:
    """A guide of somebody else's: three tokens, each one less than the one before."""

    def __init__(self, at):
        self.at = at
        self.left = 3

    @property
    def finished(self):
        return self.left == 0

    def mask(self):
        bits = bytearray(VOCAB // 8)
        bits[self.at // 8] |= 1 << self.at % 8
        return bytes(bits)

    def advance(self, token_id):
        assert token_id == self.at
        self.at -= 1
        self.left -= 1

    def fork(self):
        return Countdown(self.at)


def test_the_engine_takes_any_guide(build):
    engine = build(attention__backend="torch_paged")
    opened = engine.open_request([1], SamplingParams(n=2, max_tokens=9), guide=Countdown(70))
    while engine.has_requests:
        engine.step()
    for output in opened.collect().outputs:
        assert output.token_ids == [70, 69, 68]
        assert output.finish_reason == "stop"
    with pytest.raises(ValueError, match="a guide does not go with beam_width"):
        engine.open_request([1], SamplingParams(beam_width=2), guide=Countdown(70))


# -- the compiler -------------------------------------------------------------------------------


@pytest.fixture
def compiler(engine):
    return GuideCompiler(engine.tokenizer, engine.vocab_size, engine.eos_token_ids)


def test_what_was_compiled_is_kept_within_bounds(compiler, monkeypatch):
    monkeypatch.setattr(guides, "MAX_COMPILED", 2)
    built = []
    build = guides.build_matcher
    monkeypatch.setattr(
        guides, "build_matcher", lambda t, wanted: built.append(wanted.text) or build(t, wanted)
    )
    for pattern in ("a", "b", "a", "c", "a", "b"):
        compiler.compile(StructuredOutput.regex(pattern))
    assert built == ["a", "b", "c", "b"]


def test_guides_of_one_grammar_are_independent(compiler, engine):
    wanted = StructuredOutput.choice(["ab", "cd"])
    one, other = compiler.compile(wanted), compiler.compile(wanted)
    a, b = engine.encode("ab")
    one.advance(a)
    fork = one.fork()
    one.advance(b)
    assert one.finished
    assert not fork.finished
    assert fork.mask() != other.mask()


def test_a_mask_that_takes_too_long_is_given_up_and_nobody_else_waits(monkeypatch):
    monkeypatch.setattr(guides, "MASK_PATIENCE", 0.5)
    threads, stuck = MaskThreads(), threading.Event()

    def hang():
        stuck.wait()
        return b""

    hanging = [threads.start(hang) for _ in range(guides.MASK_THREADS)]
    queued = threads.start(lambda: b"mask")
    try:
        assert threads.wait(queued, lambda: b"mask") == b"mask"
        with pytest.raises(GuideError, match=r"takes more than 0\.5 s for one token"):
            threads.wait(hanging[0], hang)
    finally:
        stuck.set()
