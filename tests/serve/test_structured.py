"""Structured output over HTTP: what clients ask for, and what some of them try."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
from enum import Enum

import httpx
import openai
import pytest
from pydantic import BaseModel, Field
from server_process import send

from pageloom.engine.prompts import PromptEncoder
from pageloom.scheduling.structured import StructuredOutput
from pageloom.serve import grammars
from pageloom.serve.errors import APIError
from pageloom.serve.grammars import Grammars
from pageloom.serve.structured import StructuredFields

MESSAGES = [{"role": "user", "content": "Say it."}]
# Whoever compiles the first is busy for an hour. Of the second, one token takes seconds.
HARD_SCHEMA = {"type": "integer", "multipleOf": 99999989}
HARD_REGEX = "(a{1000}){1000}"


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Part(BaseModel):
    color: Color
    count: int = Field(ge=0, le=99)


class Order(BaseModel):
    urgent: bool
    parts: list[Part] = Field(max_length=2)
    note: str | None = Field(max_length=8)


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def http(server):
    with server.client() as client:
        yield client


def complete(client, **fields):
    extra = {name: fields.pop(name) for name in list(fields) if name in EXTRA}
    fields = {"model": "tiny", "prompt": "Say it:", "max_tokens": 300, "seed": 3, **fields}
    return client.completions.create(**fields, extra_body=extra).choices


EXTRA = {
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structured_outputs",
    "response_format",
    "use_beam_search",
    "ignore_eos",
}


# -- what is asked for comes --------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_parse_into_a_pydantic_model(client, seed):
    answer = client.chat.completions.parse(
        model="tiny", messages=MESSAGES, response_format=Order, seed=seed, max_tokens=700
    )
    assert isinstance(answer.choices[0].message.parsed, Order)
    assert answer.choices[0].finish_reason == "stop"


def test_every_choice_of_a_stream_has_the_form(client):
    texts, reasons = ["", "", ""], {}
    stream = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        n=3,
        seed=1,
        stream=True,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "part", "strict": True, "schema": Part.model_json_schema()},
        },
    )
    for chunk in stream:
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
    assert reasons == dict.fromkeys(range(3), "stop")
    for text in texts:
        Part.model_validate_json(text)


def test_any_json_object(client):
    answers = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        n=4,
        seed=1,
        max_tokens=500,
        response_format={"type": "json_object"},
    ).choices
    ended = [choice for choice in answers if choice.finish_reason == "stop"]
    assert ended
    assert all(isinstance(json.loads(choice.message.content), dict) for choice in ended)


def test_plain_text_is_no_form(client):
    plain, asked = (
        client.chat.completions.create(
            model="tiny", messages=MESSAGES, temperature=0, max_tokens=12, **format
        )
        for format in ({}, {"response_format": {"type": "text"}})
    )
    assert plain.choices[0].message.content == asked.choices[0].message.content


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": "[a-f]{2,5}!"}, "[a-f]{2,5}!"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_grammar": 'start: "<" start ">" | "x"'}, "<*x>*"),
        ({"guided_json": {"enum": [1, 22]}}, "1|22"),
        ({"guided_json": '{"type": "boolean"}'}, "true|false"),
        ({"structured_outputs": {"regex": "a{3}"}}, "aaa"),
        ({"structured_outputs": {"choice": ["b"]}}, "b"),
        ({"structured_outputs": {"grammar": 'start: "c"'}}, "c"),
        ({"structured_outputs": {"json": {"const": "d"}}}, '"d"'),
        ({"structured_outputs": {"json_object": True}}, r"\{.*"),
        ({"response_format": {"type": "json_object"}}, r"\{.*"),
    ],
)
def test_completions_take_every_form(client, fields, pattern):
    for choice in complete(client, n=2, **fields):
        assert re.fullmatch(pattern, choice.text, re.DOTALL)


def test_it_is_what_the_engine_says_offline(client, offline):
    from pageloom import SamplingParams

    wanted = StructuredOutput.json(Part.model_json_schema())
    params = SamplingParams(structured=wanted, seed=3, n=2, max_tokens=300)
    expected = [output.text for output in offline.generate("Say it:", params)[0].outputs]
    found = complete(client, n=2, guided_json=Part.model_json_schema())
    assert [choice.text for choice in found] == expected


# -- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"guided_regex": "("}, "guided_regex", "unclosed group"),
        ({"guided_regex": "a" * 70_000}, "guided_regex", "at most 65536 characters"),
        ({"guided_json": {"type": "foo"}}, "guided_json", "Invalid type: foo"),
        ({"guided_json": "{"}, "guided_json", "cannot be used"),
        ({"guided_json": {"title": "a" * 70_000}}, "guided_json", "may have at most 65,536"),
        ({"guided_json": '{"items":' * 5000}, "guided_json", "cannot be used"),
        ({"guided_grammar": "start: ("}, "guided_grammar", "a grammar that cannot be used"),
        ({"guided_choice": []}, "guided_choice", "at least 1"),
        ({"guided_choice": ["a"] * 5000}, "guided_choice", "at most 4096"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "send one"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one of json, regex"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "it has 2"),
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs", "structured_outputs.xml"),
        ({"response_format": {"type": "xml"}}, "response_format", "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "no json_schema"),
        (
            {
                "response_format": {
                    "type": "json_object",
                    "json_schema": {"name": "a", "schema": {}},
                }
            },
            "response_format",
            "is of type json_object",
        ),
        (
            {"guided_regex": "a", "use_beam_search": True, "n": 2, "seed": None},
            "guided_regex",
            "guided_regex is a regex, but beam search does not support it",
        ),
        ({"guided_regex": "a", "ignore_eos": True}, "guided_regex", "ignore_eos"),
    ],
)
def test_what_cannot_be_is_refused_by_name(client, fields, param, message):
    with pytest.raises(openai.BadRequestError, match=re.escape(message)) as refused:
        complete(client, **fields)
    assert refused.value.body["param"] == param


@pytest.mark.parametrize("fields", [{"guided_json": HARD_SCHEMA}, {"guided_regex": HARD_REGEX}])
def test_a_hostile_grammar_is_refused_and_everyone_else_goes_on(server, client, fields):
    free = client.completions.create(
        model="tiny", prompt="a", max_tokens=300, temperature=0, stream=True, logit_bias={"40": 100}
    )
    first = next(iter(free))
    with pytest.raises(openai.BadRequestError, match=r"too complex|too much memory"):
        complete(client, **fields)
    with pytest.raises(openai.BadRequestError, match=r"too complex|too much memory"):
        complete(client, **fields)
    assert first.choices[0].text + "".join(chunk.choices[0].text for chunk in free) == "F" * 300
    assert complete(client, guided_choice=["still here"])[0].text == "still here"
    server.wait_until_idle()


@pytest.mark.parametrize("pattern", [HARD_REGEX + "b", "[a-z]{900}"])
def test_whoever_leaves_meanwhile_leaves_nothing(server, http, pattern):
    """Of the first pattern, nobody has compiled it by then; the second is under way."""
    body = {"prompt": "a", "max_tokens": 900, "guided_regex": pattern, "stream": True}
    if pattern.startswith(HARD_REGEX):
        send(server, body).close()
    else:
        with http.stream("POST", "/v1/completions", json=body) as answer:
            next(answer.iter_lines())
    server.wait_until_idle()
    answer = http.post("/v1/completions", json={"prompt": "a", "guided_choice": ["the next"]})
    assert answer.json()["choices"][0]["text"] == "the next"


# -- trying grammars out ------------------------------------------------------------------------


def run(offline, test, left_out=0):
    """A coroutine with `Grammars` of the tiny model, or of one with some tokens less."""
    vocab_size = len(offline.tokenizer) - left_out
    prompts = PromptEncoder(offline.tokenizer, vocab_size, 1024)

    async def whole():
        tried = Grammars(prompts)
        try:
            return await test(tried)
        finally:
            await tried.close()

    return asyncio.run(whole())


def test_a_grammar_is_tried_once(offline):
    async def check(tried):
        good, bad = StructuredOutput.regex("a"), StructuredOutput.regex("(")
        await asyncio.gather(*(tried.check(good) for _ in range(5)))
        with pytest.raises(ValueError, match="unclosed group"):
            await tried.check(bad)
        await tried.close()
        await tried.check(good)
        with pytest.raises(ValueError, match="unclosed group"):
            await tried.check(bad)
        return tried._process

    assert run(offline, check) is None  # it was not started again


def test_tokens_that_the_model_does_not_have_keep_nobody_from_a_grammar(offline):
    run(offline, lambda tried: tried.check(StructuredOutput.regex("a")), left_out=2)


def test_a_process_that_is_gone_is_started_again(offline):
    async def check(tried):
        await tried.check(StructuredOutput.regex("a"))
        tried._process.kill()
        with pytest.raises(ValueError, match="too much memory to compile; make it simpler"):
            await tried.check(StructuredOutput.regex("b"))
        await tried.check(StructuredOutput.regex("c"))

    run(offline, check)


def test_a_grammar_is_not_blamed_for_a_process_that_ended_before(offline):
    async def check(tried):
        await tried.check(StructuredOutput.regex("a"))
        os.kill(tried._process.pid, signal.SIGKILL)
        await tried._process.wait()
        await tried.check(StructuredOutput.regex("b"))

    run(offline, check)


def test_whoever_leaves_while_grammars_wait_does_not_keep_others_waiting(server, http):
    async def leave(number: int) -> None:
        body = {"prompt": "a", "guided_regex": f"{HARD_REGEX}x{number}"}
        async with httpx.AsyncClient(base_url=server.url) as client:
            with contextlib.suppress(httpx.ReadTimeout):  # the first ones may get their answers
                await client.post("/v1/completions", json=body, timeout=httpx.Timeout(60, read=1))

    async def all_leave() -> None:
        await asyncio.gather(*(leave(number) for number in range(grammars.MAX_WAITING)))

    asyncio.run(all_leave())
    answer = http.post("/v1/completions", json={"prompt": "a", "guided_choice": ["one of those"]})
    assert answer.status_code == 200, answer.text


def test_whoever_leaves_takes_no_answer_of_the_next(offline):
    async def check(tried):
        await tried.check(StructuredOutput.regex("a"))
        leaving = asyncio.create_task(tried.check(StructuredOutput.regex("(")))
        await asyncio.sleep(0)
        leaving.cancel()
        await tried.check(StructuredOutput.regex("b"))
        with pytest.raises(ValueError, match="unclosed"):
            await tried.check(StructuredOutput.regex("("))

    run(offline, check)


def test_too_many_unknown_grammars_at_a_time_are_told_to_come_again(offline, monkeypatch):
    monkeypatch.setattr(grammars, "MAX_WAITING", 2)

    async def check(tried):
        asked = [tried.check(StructuredOutput.regex(pattern)) for pattern in "abcd"]
        return await asyncio.gather(*asked, return_exceptions=True)

    first, second, *others = run(offline, check)
    assert first is second is None
    assert all(isinstance(other, APIError) and other.status == 429 for other in others)


def test_a_form_says_which_field_asked_for_it():
    fields = StructuredFields(guided_choice=["a"], response_format={"type": "text"})
    assert fields.structured() == ("guided_choice", StructuredOutput.choice(["a"]))
    assert StructuredFields().structured() is None
