"""The bytes on the wire, and what is said about tokens and models."""

from __future__ import annotations

import json
import os
import signal

import openai
import pytest
from server_process import ROOT, start_server

from pageloom.serve.protocol import ChatCompletionRequest, CompletionRequest

MESSAGES = [{"role": "user", "content": "héllo"}]
CALLS = {
    "/v1/completions": {"prompt": "héllo", "max_tokens": 9, "temperature": 0},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 9, "temperature": 0},
}


@pytest.fixture(scope="module")
def http(server):
    with server.client() as client:
        yield client


def events(http, path, **fields):
    """The bodies of a stream's events, whose framing is checked byte by byte."""
    answer = http.post(path, json=CALLS[path] | {"stream": True} | fields)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.content.endswith(b"\n\ndata: [DONE]\n\n")
    *lines, last = answer.content.removesuffix(b"\n\n").split(b"\n\n")
    assert last == b"data: [DONE]"
    assert all(line.startswith(b"data: {") and b"\n" not in line for line in lines)
    return [json.loads(line.removeprefix(b"data: ")) for line in lines]


@pytest.mark.parametrize("path", CALLS)
def test_every_event_has_the_same_head(http, path):
    bodies = events(http, path)
    names = ("id", "object", "created", "model", "system_fingerprint")
    heads = {tuple(body[name] for name in names) for body in bodies}
    assert len(heads) == 1
    assert not any("usage" in body for body in bodies)
    reasons = [body["choices"][0]["finish_reason"] for body in bodies]
    assert reasons == [None] * (len(bodies) - 1) + ["length"]


def test_curl_needs_no_header(http):
    """It says that what ``-d`` sends is a form."""
    path = "/v1/completions"
    form = {"content-type": "application/x-www-form-urlencoded"}
    answer = http.post(path, content=json.dumps(CALLS[path]).encode(), headers=form)
    assert answer.json()["choices"] == http.post(path, json=CALLS[path]).json()["choices"]


@pytest.mark.parametrize("path", CALLS)
def test_usage_is_a_last_event_without_choices(http, path):
    *bodies, last = events(http, path, stream_options={"include_usage": True})
    whole = http.post(path, json=CALLS[path]).json()
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 9
    assert last["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    assert all(body["usage"] is None and body["choices"] for body in bodies)


@pytest.mark.parametrize("path", CALLS)
def test_usage_may_come_with_every_event(http, path):
    options = {"include_usage": True, "continuous_usage_stats": True}
    bodies = events(http, path, stream_options=options)
    counts = [body["usage"]["completion_tokens"] for body in bodies]
    assert counts == sorted(counts)
    assert counts[0] >= 1
    assert counts[-2:] == [9, 9]
    assert bodies[-1]["choices"] == []


@pytest.mark.parametrize("length", [1024, 100_000])
@pytest.mark.parametrize("path", CALLS)
def test_what_fails_before_the_first_token_has_a_status_and_no_stream(http, path, length):
    text = "a" * length
    long = {"prompt": text, "messages": [{"role": "user", "content": text}]}
    fields = {name: long[name] for name in CALLS[path].keys() & long}
    answer = http.post(path, json=CALLS[path] | {"stream": True} | fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert answer.json()["error"].keys() == {"message", "type", "param", "code"}


def test_cached_tokens_are_counted(http):
    body = {"prompt": "a prefix of some blocks " * 5, "max_tokens": 1, "cache_salt": "wire"}
    counts = [
        http.post("/v1/completions", json=body).json()["usage"]["prompt_tokens_details"]
        for _ in range(2)
    ]
    assert counts[0]["cached_tokens"] == 0 < counts[1]["cached_tokens"]


def test_texts_and_tokens(http, offline):
    token_ids = offline.encode("héllo")
    found = http.post("/tokenize", json={"prompt": "héllo", "return_token_strs": True}).json()
    assert found == {
        "count": 6,
        "max_model_len": offline.info.max_model_len,
        "tokens": token_ids,
        "token_strs": ["h", "Ã", "©", "l", "l", "o"],
    }
    back = http.post("/detokenize", json={"model": "tiny", "tokens": token_ids})
    assert back.json() == {"prompt": "héllo"}
    empty = http.post("/tokenize", json={"prompt": "", "add_special_tokens": False}).json()
    assert (empty["count"], empty["tokens"]) == (0, [])


def test_tokens_of_a_conversation(http, offline):
    def tokens(**fields):
        return http.post("/tokenize", json={"messages": MESSAGES} | fields).json()["tokens"]

    assert tokens() == offline.render_chat(MESSAGES)
    ended = offline.prompts.render_chat(MESSAGES, add_generation_prompt=False)
    assert tokens(add_generation_prompt=False) == ended
    begun = offline.prompts.render_chat(
        MESSAGES, add_generation_prompt=False, continue_final_message=True
    )
    assert tokens(continue_final_message=True) == begun == ended[:-2]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": "a", "continue_final_message": True}, "continue_final_message"),
        ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "model"),
        ("/tokenize", {"prompt": "a", "guess": 1}, "guess"),
        ("/detokenize", {"tokens": [9999]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ],
)
def test_what_cannot_be_tokenized_is_refused_by_name(http, path, body, param):
    answer = http.post(path, json=body)
    assert answer.status_code == (404 if param == "model" else 400)
    assert answer.json()["error"]["param"] == param


def test_a_remote_tokenizer_can_be_rebuilt(http, offline):
    """What evaluation harnesses ask for, and nothing about this machine."""
    found = http.get("/tokenizer_info").json()
    tokenizer = offline.tokenizer
    assert found["eos_token"] == tokenizer.eos_token
    assert found["chat_template"] == tokenizer.chat_template
    assert found["added_tokens_decoder"]["1"] == {"content": "<|im_start|>", "special": True}
    assert tokenizer.name_or_path not in json.dumps(found)


def test_models(server, config):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        (card,) = client.models.list().data
        assert card == client.models.retrieve("tiny")
        assert (card.id, card.object, card.owned_by) == ("tiny", "model", "pageloom")
        assert card.root == config.parent.name
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("other/model")


@pytest.mark.parametrize("model", [CompletionRequest, ChatCompletionRequest])
def test_the_documentation_names_every_field(model):
    text = (ROOT / "docs/server.md").read_text(encoding="utf-8")
    assert [name for name in model.model_fields if f"`{name}`" not in text] == []


def test_unknown_fields_may_be_ignored_and_a_stream_that_fails_says_so(config):
    """Both with one server of its own, since it is ended by the second."""
    sets = ("server.unknown_fields=ignore", "model.max_model_len=16384")
    with start_server(config, *sets) as server:
        engine = server.engine_pid()
        with server.client() as http:
            for path, body in CALLS.items():
                answers = [http.post(path, json=body | more) for more in ({}, {"guess": {"a": 1}})]
                plain, ignoring = (answer.json()["choices"] for answer in answers)
                assert plain == ignoring
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            chunks = client.completions.create(
                model="tiny",
                prompt="a",
                max_tokens=16_000,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            next(iter(chunks))
            os.kill(engine, signal.SIGKILL)
            with pytest.raises(openai.APIError, match="engine has stopped") as raised:
                list(chunks)
        assert raised.value.type == "server_error"
        assert server.wait() != 0
