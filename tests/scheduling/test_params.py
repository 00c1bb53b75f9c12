import copy
import dataclasses
import math
import pickle
import subprocess
import sys

import pytest

from pageloom.scheduling.errors import RequestError
from pageloom.scheduling.params import (
    MAX_BEAM_WIDTH,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP,
    MAX_STOP_CHARS,
    MAX_STOP_TOKEN_IDS,
    NOT_WITH_BEAMS,
    SamplingParams,
)
from pageloom.scheduling.structured import MAX_STRUCTURED_CHARS, StructuredOutput

REAL_FIELDS = (
    "length_penalty",
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
INTEGER_FIELDS = (
    "n",
    "beam_width",
    "top_k",
    "seed",
    "min_tokens",
    "max_tokens",
    "logprobs",
    "prompt_logprobs",
)
FLAGS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")


def refusal(**fields):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**fields)
    message = str(caught.value)
    assert message.startswith(f"{caught.value.field} ")
    return message


def test_every_field_is_covered_by_these_tests():
    others = {"early_stopping", "logit_bias", "stop", "stop_token_ids", "structured"}
    named = {field.name for field in dataclasses.fields(SamplingParams)}
    assert named == others | set(REAL_FIELDS) | set(INTEGER_FIELDS) | set(FLAGS)


def test_the_defaults_sample_from_the_plain_distribution_until_the_model_stops():
    params = SamplingParams()
    assert not params.greedy
    assert params.max_tokens is None
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (1.0, 0, 1.0, 0.0)


def test_params_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = 0.5


@pytest.mark.parametrize(
    "fields",
    [
        {"n": MAX_N},
        {"n": 2, "beam_width": 2, "length_penalty": -10, "early_stopping": "never"},
        {"n": MAX_BEAM_WIDTH, "beam_width": MAX_BEAM_WIDTH, "length_penalty": 10},
        {"temperature": 0},
        {"temperature": 1e-4},
        {"temperature": 2},
        {"top_k": -1},
        {"top_k": 10**9},
        {"top_p": 1},
        {"top_p": 1e-9},
        {"min_p": 1},
        {"presence_penalty": -2, "frequency_penalty": 2},
        {"seed": -(2**63)},
        {"min_tokens": 4, "max_tokens": 4},
        {"logprobs": 0, "prompt_logprobs": MAX_LOGPROBS},
        {"logit_bias": {0: -100, 7: 100.0}},
        {"logit_bias": {}},
        {"stop": ["x"] * MAX_STOP, "stop_token_ids": [1] * MAX_STOP_TOKEN_IDS},
    ],
)
def test_values_at_the_limits_are_accepted(fields):
    params = SamplingParams(**fields)
    for name, value in fields.items():
        kept = getattr(params, name)
        assert kept == (tuple(value) if isinstance(value, list) else value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("n", MAX_N + 1),
        ("beam_width", 1),
        ("beam_width", MAX_BEAM_WIDTH + 1),
        ("length_penalty", -10.1),
        ("length_penalty", 10.1),
        ("early_stopping", "always"),
        ("early_stopping", 1),
        ("early_stopping", None),
        ("temperature", -0.1),
        ("temperature", 1e-5),
        ("temperature", 101),
        ("top_k", -2),
        ("top_p", 0),
        ("top_p", 1.01),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", 101),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("seed", 2**63),
        ("min_tokens", -1),
        ("max_tokens", 0),
        ("logprobs", -1),
        ("logprobs", MAX_LOGPROBS + 1),
        ("prompt_logprobs", MAX_LOGPROBS + 1),
        *((name, bad) for name in REAL_FIELDS for bad in (math.nan, math.inf, "1", None, True)),
        *((name, bad) for name in INTEGER_FIELDS for bad in (1.0, "1", True, math.nan)),
        *((name, bad) for name in FLAGS for bad in (0, "yes", None)),
        ("temperature", False),
        ("stop", 5),
        ("stop", b"end"),
        ("stop", ["a", 5]),
        ("stop_token_ids", 5),
        ("stop_token_ids", "5"),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", None),
        ("logit_bias", [1, 2]),
    ],
)
def test_a_bad_value_is_refused_with_field_value_and_what_would_work(name, value):
    message = refusal(**{name: value})
    assert message.startswith(f"{name} is {value!r}, but must be ")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens is 5, more than max_tokens, 4"),
        ({"n": 5, "beam_width": 4}, "n is 5, more than beam_width, 4"),
        ({"length_penalty": 2.0}, "length_penalty is 2.0, but without beam_width there is no"),
        ({"early_stopping": True}, "early_stopping is True, but without beam_width there is no"),
        ({"early_stopping": "never"}, "early_stopping is 'never', but without beam_width"),
        ({"stop": ""}, "stop holds a string of 0 characters"),
        ({"stop": ["x" * (MAX_STOP_CHARS + 1)]}, "stop holds a string of 257 characters"),
        ({"stop": ["x"] * (MAX_STOP + 1)}, "stop has 17 strings, but may have at most 16"),
        ({"stop_token_ids": range(MAX_STOP_TOKEN_IDS + 1)}, "stop_token_ids has 257 ids"),
        ({"logit_bias": {-1: 0.0}}, "logit_bias has the key -1"),
        ({"logit_bias": {"1": 0.0}}, "logit_bias has the key '1'"),
        ({"logit_bias": {1: math.nan}}, "logit_bias of token 1 is nan"),
        ({"logit_bias": {1: 100.5}}, "logit_bias of token 1 is 100.5"),
        (
            {"logit_bias": dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 0.0)},
            "logit_bias has 1025 entries, but may have at most 1024",
        ),
    ],
)
def test_what_is_wrong_inside_a_list_or_between_fields_is_named(fields, message):
    assert message in refusal(**fields)


BESIDE_BEAMS = {
    "temperature": 0.7,
    "top_k": 5,
    "top_p": 0.9,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "logit_bias": {1: 2.0},
    "seed": 0,
    "stop": ("end",),
    "logprobs": 0,
    "structured": StructuredOutput.regex("a+"),
}


@pytest.mark.parametrize(("name", "value"), BESIDE_BEAMS.items())
def test_what_beam_search_would_ignore_is_refused(name, value):
    message = refusal(beam_width=4, **{name: value})
    shown = "a regex" if name == "structured" else repr(value)
    assert message.startswith(f"{name} is {shown}, but beam search does not support it")
    for harmless in NOT_WITH_BEAMS[name]:
        SamplingParams(beam_width=4, **{name: harmless})


def test_every_field_either_works_with_beams_or_is_refused():
    works = {
        "n": 4,
        "beam_width": 4,
        "length_penalty": 0.5,
        "early_stopping": True,
        "stop_token_ids": (3,),
        "ignore_eos": True,
        "min_tokens": 2,
        "max_tokens": 5,
        "prompt_logprobs": 3,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
    }
    SamplingParams(**works)
    named = {field.name for field in dataclasses.fields(SamplingParams)}
    assert named == set(works) | set(BESIDE_BEAMS)
    assert set(BESIDE_BEAMS) == set(NOT_WITH_BEAMS)


@pytest.mark.parametrize(
    ("given", "kept"),
    [(None, ()), ("end", ("end",)), (["a", "b"], ("a", "b")), ((), ()), ([], ())],
)
def test_stop_is_kept_as_a_tuple(given, kept):
    params = SamplingParams(stop=given)
    assert params.stop_strings == params.stop == kept


def test_what_the_caller_does_to_its_containers_later_does_not_matter():
    bias, stop_token_ids = {1: 2.0}, [3]
    params = SamplingParams(logit_bias=bias, stop_token_ids=stop_token_ids)
    bias[9], stop_token_ids[0] = 1.0, 9
    assert (params.logit_bias, params.stop_token_ids) == ({1: 2.0}, (3,))


def test_a_copy_with_a_change_is_checked_too():
    params = SamplingParams(stop="x", logit_bias={1: 1.0})
    assert dataclasses.replace(params, max_tokens=3).stop_strings == ("x",)
    with pytest.raises(ValueError, match="max_tokens is 0"):
        dataclasses.replace(params, max_tokens=0)


@pytest.mark.parametrize("fields", [{"logit_bias": {10: 1.0}}, {"stop_token_ids": [3, 10]}])
def test_token_ids_outside_the_vocabulary_are_refused(fields):
    params = SamplingParams(**fields)
    params.check_vocab(11)
    with pytest.raises(ValueError, match=f"{next(iter(fields))} names token id 10.* 0 to 9"):
        params.check_vocab(10)


def test_params_import_no_tensor_library():
    code = "import sys, pageloom.scheduling.params; print({'torch', 'numpy'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "set()", result.stderr


def test_a_checked_logit_bias_can_no_longer_be_changed():
    params = SamplingParams(logit_bias={1: 2.0})
    with pytest.raises(TypeError):
        params.logit_bias[1] = math.nan
    assert params == SamplingParams(logit_bias={1: 2.0}) != SamplingParams(logit_bias={1: 3.0})
    assert dataclasses.replace(params, top_k=3) == SamplingParams(logit_bias={1: 2.0}, top_k=3)


@pytest.mark.parametrize("fields", [{}, {"logit_bias": {1: 2.0}, "stop": ["x"], "seed": 4}])
def test_params_can_be_copied_and_pickled(fields):
    params = SamplingParams(**fields)
    assert copy.deepcopy(params) == pickle.loads(pickle.dumps(params)) == params


def test_a_structured_output_may_come_as_plain_data():
    wanted = StructuredOutput.regex("a+")
    assert SamplingParams(structured={"kind": "regex", "text": "a+"}).structured == wanted
    assert SamplingParams().structured is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"structured": "a+"}, "structured is 'a+', but must be a StructuredOutput, or None"),
        ({"structured": {"regex": "a+"}}, "structured is not a kind and a text"),
        ({"structured": {"kind": "xml", "text": ""}}, "structured is of kind 'xml', but must be"),
        ({"structured": {"kind": "json", "text": {}}}, "structured has a text that is dict"),
        ({"structured": {"kind": "choice", "text": "[]"}}, "not a list of one text or more"),
        ({"structured": {"kind": "choice", "text": "[1]"}}, "not a list of one text or more"),
        ({"structured": {"kind": "choice", "text": "["}}, "not valid JSON"),
        (
            {"structured": {"kind": "regex", "text": "a" * (MAX_STRUCTURED_CHARS + 1)}},
            "may have at most 65,536",
        ),
        (
            {"structured": StructuredOutput.json(), "ignore_eos": True},
            "structured says where an output ends, and ignore_eos that it goes on",
        ),
    ],
)
def test_a_structured_output_is_checked(fields, message):
    assert message in refusal(**fields)
