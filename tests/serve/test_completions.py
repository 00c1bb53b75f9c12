"""``/v1/completions`` says what the offline engine does."""

from __future__ import annotations

import json
import math

import httpx
import openai
import pytest

from pageloom import SamplingParams
from pageloom.serve.protocol import CompletionRequest

PROMPTS = ["The sea", "héllo", "1, 2, 3,"]
GREEDY = {"temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def http(server):
    with server.client() as client:
        yield client


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        yield client


def complete(http, **fields):
    answer = http.post("/v1/completions", json={"prompt": "The sea", **GREEDY} | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refuse(http, **fields):
    answer = http.post("/v1/completions", json={"prompt": "The sea", **GREEDY} | fields)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def stream(http, **fields):
    """The bodies of the events before the end."""
    body = {"prompt": "The sea", **GREEDY, "stream": True} | fields
    answer = http.post("/v1/completions", json=body)
    *events, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def joined(chunks):
    """The choices that a stream's chunks add up to, by index."""
    choices = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            whole = choices.setdefault(part["index"], {"text": "", "logprobs": None})
            whole["text"] += part["text"]
            whole |= {key: part[key] for key in ("index", "finish_reason", "stop_reason")}
            if part["logprobs"]:
                before = whole["logprobs"] or {key: [] for key in part["logprobs"]}
                whole["logprobs"] = {key: before[key] + part["logprobs"][key] for key in before}
    return [choices[index] for index in sorted(choices)]


def ran(offline, prompts=("The sea",), **params):
    return offline.generate(list(prompts), SamplingParams(**{**GREEDY, **params}))


@pytest.mark.parametrize("as_ids", [False, True], ids=["texts", "ids"])
def test_prompts_are_answered_in_order(client, offline, as_ids):
    prompts = [offline.encode(p) for p in PROMPTS] if as_ids else PROMPTS
    params = {"seed": 5, "temperature": 0.8, "max_tokens": 8, "n": 2}
    answer = client.completions.create(model="tiny", prompt=prompts, **params)
    expected = [output for whole in ran(offline, prompts, **params) for output in whole.outputs]
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.text for choice in answer.choices] == [output.text for output in expected]
    assert [choice.finish_reason for choice in answer.choices] == ["length"] * 6
    assert answer.usage.prompt_tokens == sum(len(offline.encode(p)) for p in PROMPTS)
    assert answer.usage.completion_tokens == 6 * 8


def test_one_prompt_of_ids_is_one_prompt(http, offline):
    (choice,) = complete(http, prompt=offline.encode("héllo"))["choices"]
    assert choice["text"] == ran(offline, ["héllo"])[0].outputs[0].text


def test_the_default_is_sixteen_tokens(http):
    answer = http.post("/v1/completions", json={"prompt": "a", "ignore_eos": True, "seed": 1})
    assert answer.json()["usage"]["completion_tokens"] == 16


def test_a_stream_adds_up_to_the_answer(http):
    fields = {"prompt": PROMPTS, "n": 2, "seed": 3, "temperature": 1, "logprobs": 2, "echo": True}
    whole = complete(http, **fields)["choices"]
    for part, expected in zip(joined(stream(http, **fields)), whole, strict=True):
        scores, others = expected.pop("logprobs"), part.pop("logprobs")
        assert part == expected
        for name in ("text_offset", "tokens"):
            assert others[name] == scores[name]
        assert others["token_logprobs"][1:] == pytest.approx(scores["token_logprobs"][1:], abs=1e-4)


def test_the_openai_client_reads_the_stream(client, offline):
    options = {"include_usage": True}
    with client.completions.create(
        model="tiny", prompt="héllo", stream=True, stream_options=options, **GREEDY
    ) as chunks:
        *chunks, last = list(chunks)
    assert "".join(c.choices[0].text for c in chunks) == ran(offline, ["héllo"])[0].outputs[0].text
    assert chunks[-1].choices[0].finish_reason == "length"
    assert last.choices == []
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (6, 12)


@pytest.mark.parametrize("generated", [0, 1])
def test_echo_scores_the_prompt(http, offline, generated):
    """As evaluation harnesses ask for it: no entry more, none less."""
    prompt = "héllo there"
    token_ids = offline.encode(prompt)
    answer = complete(http, prompt=prompt, echo=True, logprobs=1, max_tokens=generated)
    (choice,) = answer["choices"]
    assert answer["usage"]["completion_tokens"] == generated
    assert choice["finish_reason"] == "length"
    (whole,) = ran(offline, [prompt], max_tokens=1, logprobs=1, prompt_logprobs=1)
    expected = [*whole.prompt_logprobs, *whole.outputs[0].logprobs][: len(token_ids) + generated]
    lists = choice["logprobs"]
    assert all(len(values) == len(token_ids) + generated for values in lists.values())
    assert lists["token_logprobs"][0] is lists["top_logprobs"][0] is None
    for value, top, score in zip(
        lists["token_logprobs"][1:], lists["top_logprobs"][1:], expected[1:], strict=True
    ):
        assert value == pytest.approx(score.logprob, abs=1e-4)
        assert max(top.values()) == pytest.approx(score.top[0][1], abs=1e-4)
        assert (max(top.values()) == value) == (score.rank == 1)  # exactly
    assert choice["text"].startswith(prompt)
    assert lists["text_offset"][: len(token_ids)] == [0, 1, 1, *range(2, len(prompt))]
    if generated:
        assert max(lists["top_logprobs"][-1].values()) == lists["token_logprobs"][-1]
        assert lists["text_offset"][-1] == len(prompt)
    else:
        assert choice["text"] == prompt
    fields = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": generated}
    (streamed,) = joined(stream(http, **fields))
    assert streamed["text"] == choice["text"]
    assert streamed["logprobs"]["tokens"] == lists["tokens"]


def test_echo_of_several_prompts_and_outputs(http):
    answer = complete(http, prompt=PROMPTS, n=2, echo=True, logprobs=0, max_tokens=3, seed=1)
    texts = [choice["text"] for choice in answer["choices"]]
    assert [text.startswith(PROMPTS[i // 2]) for i, text in enumerate(texts)] == [True] * 6
    for choice in answer["choices"]:
        prompt = PROMPTS[choice["index"] // 2].encode()
        assert len(choice["logprobs"]["tokens"]) == len(prompt) + 3
        assert len(choice["logprobs"]["top_logprobs"][-1]) == 1  # the token itself


def test_echo_without_logprobs_is_text(http, offline):
    (choice,) = complete(http, prompt=offline.encode("héllo"), echo=True)["choices"]
    assert choice["text"] == "héllo" + ran(offline, ["héllo"])[0].outputs[0].text
    assert choice["logprobs"] is None


def test_the_prompt_is_scored_again_though_it_is_cached(http):
    fields = {"prompt": "a prefix that fills some blocks " * 4, "echo": True, "max_tokens": 1}
    first = complete(http, **fields)
    again = complete(http, **fields)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    first, second = (complete(http, logprobs=1, **fields)["choices"][0] for _ in range(2))
    assert first["logprobs"]["token_logprobs"][1:] == pytest.approx(
        second["logprobs"]["token_logprobs"][1:], abs=1e-4
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": ["\x07", "A"], "max_tokens": 60, "temperature": 1, "seed": 2},
        {"stop": "A", "include_stop_str_in_output": True, "temperature": 1, "seed": 4},
        {"stop_token_ids": [35, 40, 70, 130], "temperature": 1, "seed": 4, "max_tokens": 60},
        {"min_tokens": 20, "max_tokens": 24, "stop": ["e"], "temperature": 1, "seed": 1},
        {"frequency_penalty": 1.5, "presence_penalty": 0.5, "repetition_penalty": 1.2},
        {"top_k": 3, "top_p": 0.9, "min_p": 0.05, "temperature": 1.5, "seed": 7},
        {"ignore_eos": True, "skip_special_tokens": False, "temperature": 2, "seed": 8},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_sampling_fields_mean_what_they_do_offline(http, offline, fields):
    (choice,) = complete(http, **fields)["choices"]
    (output,) = ran(offline, **fields)[0].outputs
    found = (choice["text"], choice["finish_reason"], choice["stop_reason"])
    assert found == (output.text, output.finish_reason, output.stop_reason)


def test_biased_tokens_are_named_by_strings(http, offline):
    answer = complete(http, logit_bias={"35": 100, "36": -100.0}, max_tokens=3)
    (output,) = ran(offline, logit_bias={35: 100, 36: -100}, max_tokens=3)[0].outputs
    assert output.token_ids == [35] * 3
    assert answer["choices"][0]["text"] == output.text


def test_best_of_returns_the_likeliest(http, offline):
    fields = {"temperature": 1, "seed": 11, "max_tokens": 5}
    tried = ran(offline, n=5, logprobs=0, **fields)[0].outputs
    tried.sort(key=lambda o: math.fsum(s.logprob for s in o.logprobs) / len(o.logprobs))
    answer = complete(http, n=2, best_of=5, **fields)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert [c["text"] for c in answer["choices"]] == [tried[-1].text, tried[-2].text]
    assert [choice["logprobs"] for choice in answer["choices"]] == [None, None]
    assert answer["usage"]["completion_tokens"] == sum(len(o.token_ids) for o in tried)


@pytest.mark.parametrize("streamed", [False, True])
def test_beam_search(http, offline, streamed):
    fields = {"n": 2, "max_tokens": 6}
    beams = {"length_penalty": 0.5, "early_stopping": "never"}
    outputs = ran(offline, beam_width=4, **beams, **fields)[0].outputs
    fields |= beams | {"use_beam_search": True, "best_of": 4}
    if streamed:
        choices = joined(stream(http, **fields))
    else:
        choices = complete(http, **fields)["choices"]
    assert [choice["text"] for choice in choices] == [output.text for output in outputs]


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"prompt": ["a", [1]]}, "prompt", "a list of texts"),
        ({"prompt": ["a", ""]}, "prompt", "prompt 1 is empty"),
        ({"prompt": [[1.0]]}, "prompt", "token ids"),
        ({"prompt": [5000]}, "prompt", "not in the vocabulary"),
        ({"prompt": ["a"] * 257}, "prompt", "257 prompts"),
        ({"prompt": "a" * 1024}, "prompt", "the request has a prompt of 1024 tokens"),
        ({"prompt": None}, "prompt", "must be a text"),
        ({"max_tokens": 0}, "max_tokens", "echo"),
        ({"max_tokens": 0, "echo": True, "min_tokens": 2}, "min_tokens", "2"),
        ({"min_tokens": 20}, "min_tokens", "max_tokens"),
        ({"logprobs": 21}, "logprobs", "20"),
        ({"logprobs": False}, "logprobs", "true or false"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "integer"),
        ({"logit_bias": {"900": 1}}, "logit_bias", "vocabulary"),
        ({"stop": [3]}, "stop", "a string or a list of strings"),
        ({"stop": [""]}, "stop", "0 characters"),
        ({"temperature": -1}, "temperature", "-1"),
        ({"seed": 2**64}, "seed", "integer"),
        ({"top_k": 2**40}, "top_k", "2147483648"),
        ({"n": 0}, "n", "1"),
        ({"n": 3, "best_of": 2}, "best_of", "less than n"),
        ({"best_of": 2, "stream": True}, "best_of", "streamed"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
        ({"stream": True, "stream_options": {"other": 1}}, "stream_options", "other"),
        ({"use_beam_search": True}, "best_of", "2 to 64"),
        ({"use_beam_search": True, "n": 2, "logprobs": 1}, "logprobs", "use_beam_search"),
        ({"use_beam_search": True, "n": 2, "temperature": 0.5}, "temperature", "beam search"),
        ({"length_penalty": 2}, "length_penalty", "use_beam_search"),
        ({"early_stopping": "soon"}, "early_stopping", "never"),
        ({"suffix": "end"}, "suffix", "suffix"),
        ({"guess": 1}, "guess", "no field 'guess'"),
    ],
    ids=lambda value: None,
)
def test_what_cannot_be_is_refused_by_name(http, fields, param, said):
    error = refuse(http, **fields)
    assert error["param"] == param
    assert said in error["message"]
    assert error["type"] == "invalid_request_error"


def test_a_prompt_that_is_too_long_has_the_code_for_it(http):
    assert refuse(http, prompt="a" * 1024)["code"] == "context_length_exceeded"


def test_null_is_as_absent(http):
    fields = CompletionRequest.model_fields.keys() - {"prompt", "temperature", "max_tokens"}
    nulls = dict.fromkeys(fields)
    assert complete(http, **nulls)["choices"] == complete(http)["choices"]
    nulls |= {"max_tokens": None, "stream": True, "stream_options": {"include_usage": None}}
    assert joined(stream(http, **nulls))[0]["text"]


def test_a_model_that_is_not_here(client):
    with pytest.raises(openai.NotFoundError, match="'other' does not exist; there is 'tiny'"):
        client.completions.create(model="other", prompt="a")


def test_the_body_must_be_json(http):
    answer: httpx.Response = http.post("/v1/completions", content=b"{'prompt': 1}")
    assert answer.status_code == 400
    message = "the body is not valid JSON: key must be a string at line 1 column 2"
    assert answer.json()["error"]["message"] == message
    coded = http.post("/v1/completions", content=b"{}", headers={"content-encoding": "gzip"})
    assert coded.status_code == 415
    assert "'gzip'" in coded.json()["error"]["message"]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("guided_json", 5, "a valid string, or: Input should be an object"),
        ("prompt", {}, "prompt: "),
    ],
)
def test_a_field_of_several_types_says_all_and_its_own_name_only(http, field, value, message):
    answer = http.post("/v1/completions", json={"prompt": "a", field: value})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, field)
    assert error["message"].startswith(f"{field}: ")
    assert message in error["message"]
