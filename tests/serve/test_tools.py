"""Tool calling over HTTP, as the `openai` client drives it."""

from __future__ import annotations

import asyncio
import json
import re

import openai
import pytest
from pydantic import BaseModel, Field
from server_process import start_server
from tool_models import (
    CALL,
    HERMES_TEMPLATE,
    MESSAGES,
    TOOLS,
    WEATHER,
    ask,
    check,
    guided,
    write_model,
)


@pytest.fixture(scope="module")
def hermes(tmp_path_factory):
    with start_server(write_model(tmp_path_factory.mktemp("hermes"), HERMES_TEMPLATE)) as server:
        yield server
        server.wait_until_idle()


@pytest.fixture(scope="module")
def client(hermes):
    with openai.OpenAI(base_url=f"{hermes.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def put_together(stream):
    """The text, the calls and the reason to end of each choice."""
    found = {}
    for chunk in stream:
        (choice,) = chunk.choices
        if choice.index not in found:
            assert choice.delta.role == "assistant"
            found[choice.index] = ["", [], None]
        text_and_calls = found[choice.index]
        text_and_calls[0] += choice.delta.content or ""
        for call in choice.delta.tool_calls or []:
            calls = text_and_calls[1]
            if call.index == len(calls):
                assert call.id.startswith("call_")
                assert call.type == "function"
                calls.append([call.function.name, ""])
            assert call.function.name in (None, calls[call.index][0])
            calls[call.index][1] += call.function.arguments
        text_and_calls[2] = choice.finish_reason or text_and_calls[2]
    return [tuple(found[index]) for index in sorted(found)]


def whole(answer):
    return [
        (
            choice.message.content or "",
            [[c.function.name, c.function.arguments] for c in choice.message.tool_calls or []],
            choice.finish_reason,
        )
        for choice in answer.choices
    ]


# -- what the model may do ----------------------------------------------------------------------


def test_a_call_is_told_from_text(client):
    (choice,) = ask(client, **guided(f"Let me see\\.\n{CALL}\n{CALL}")).choices
    assert choice.message.content == "Let me see."
    assert choice.finish_reason == "tool_calls"
    first, second = choice.message.tool_calls
    assert first.id != second.id
    assert re.fullmatch("[a-z]{3}", first.function.name)
    assert list(json.loads(second.function.arguments)) == ["a"]


def test_nothing_but_a_call_has_no_content(client):
    (choice,) = ask(client, **guided(CALL)).choices
    assert choice.message.content is None
    assert len(choice.message.tool_calls) == 1


def test_an_answer_without_a_call_is_text(client):
    for fields in (guided("<tool_[a-z]{4}"), {"tool_choice": "none"} | guided(CALL)):
        (choice,) = ask(client, **fields).choices
        assert choice.message.content.startswith("<tool_")
        assert choice.message.tool_calls is None
        assert choice.finish_reason == "stop"


@pytest.mark.parametrize(
    "fields", [guided(f"(a b){{3}} {CALL}{CALL}"), {"tool_choice": "required"}]
)
@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_adds_up_to_the_answer(client, fields, n):
    answers = whole(ask(client, n=n, **fields))
    assert put_together(ask(client, n=n, stream=True, **fields)) == answers
    assert {reason for *_, reason in answers} <= {"tool_calls", "length"}
    assert all(calls for _, calls, _ in answers)


def test_arguments_come_as_they_are_written(client):
    deltas = [
        call
        for chunk in ask(client, stream=True, **guided(CALL))
        for call in chunk.choices[0].delta.tool_calls or []
    ]
    assert deltas[0].function.name
    assert [call.id is not None for call in deltas] == [True] + [False] * (len(deltas) - 1)
    assert len(deltas) > 6


def test_a_call_that_is_cut_off_says_so(client):
    (choice,) = ask(client, max_tokens=56, **guided(CALL.replace("0,8", "99"))).choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "length"
    assert re.fullmatch(r'\{"a": \[[0-9]+', call.function.arguments)


@pytest.mark.parametrize(
    ("stop", "names", "reason"),
    [
        ('": [', [], "stop"),  # within the arguments
        ("\n</tool_call>", ["f"], "tool_calls"),  # behind them
        ('{"name": "g"', ["f"], "tool_calls"),
        ("[2", ["f"], "tool_calls"),  # within those of the second call
        ('"arg', [], "stop"),  # before any
        ("never", ["f", "g"], "tool_calls"),
    ],
)
def test_a_call_that_a_stop_string_cuts_off_is_none(client, stop, names, reason):
    call = r'<tool_call>\n\{{"name": "{}", "arguments": \{{"a": \[{}\]\}}\}}\n</tool_call>'
    fields = {"stop": [stop], **guided(call.format("f", 1) + call.format("g", 2))}
    answers = whole(ask(client, **fields))
    ((_, calls, found),) = answers
    assert ([name for name, _ in calls], found) == (names, reason)
    assert all(json.loads(arguments) for _, arguments in calls)
    assert put_together(ask(client, stream=True, **fields)) == answers


def test_a_call_that_is_required_is_whole_or_none(client):
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": GetForecast.model_json_schema()},
    }
    fields = {"tools": [tool], "tool_choice": "required", "n": 8, "stop": ["1", "a", "e", "A"]}
    reasons = set()
    answers = whole(ask(client, **fields))
    for _, calls, reason in answers:
        for name, arguments in calls:
            assert name == "f"
            GetForecast.model_validate_json(arguments)
        assert reason == ("tool_calls" if calls else "stop")
        reasons.add(reason)
    assert "stop" in reasons
    assert put_together(ask(client, stream=True, **fields)) == answers


def test_one_call_if_they_are_not_to_be_parallel(client):
    fields = {"parallel_tool_calls": False, **guided(f"{CALL}{CALL}")}
    for answer in (whole(ask(client, **fields)), put_together(ask(client, stream=True, **fields))):
        ((_, calls, reason),) = answer
        assert (len(calls), reason) == (1, "tool_calls")


# -- what the model must do ---------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_a_required_call_follows_the_schema(client, seed):
    fields = {"tool_choice": "required", "parallel_tool_calls": False, "seed": seed}
    (choice,) = ask(client, **fields).choices
    (call,) = choice.message.tool_calls
    assert choice.message.content is None
    assert choice.finish_reason == "tool_calls"
    check(call.function)


def test_several_calls_may_be_required(client):
    counts = set()
    for choice in ask(client, tools=[WEATHER], tool_choice="required", n=8).choices:
        calls = choice.message.tool_calls
        counts.add(len(calls))
        for call in calls if choice.finish_reason == "tool_calls" else calls[:-1]:
            check(call.function)
    assert max(counts) > 1


@pytest.mark.parametrize("name", ["weather", "get-clock.v2"])
def test_a_named_function_is_called(client, name):
    choice = {"type": "function", "function": {"name": name}}
    fields = {"parallel_tool_calls": False, "tool_choice": choice}
    for answer in ask(client, n=3, **fields).choices:
        (call,) = answer.message.tool_calls
        assert call.function.name == name
        check(call.function)


class GetForecast(BaseModel):
    """Of some days."""

    days: list[int] = Field(max_length=2)
    city: str = Field(max_length=5)


def test_parse_into_a_pydantic_model(client):
    tool = openai.pydantic_function_tool(GetForecast)
    fields = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    fields |= {"model": "tiny", "messages": MESSAGES, "max_tokens": 900, "seed": 2}
    answer = client.chat.completions.parse(**fields)
    (call,) = answer.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, GetForecast)
    with client.chat.completions.stream(**fields) as stream:
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls
    assert streamed.function.parsed_arguments == call.function.parsed_arguments


def test_an_async_client(hermes):
    async def ask_all():
        async with openai.AsyncOpenAI(base_url=f"{hermes.url}/v1", api_key="none") as client:
            asked = [ask(client, tool_choice="required", seed=seed) for seed in range(4)]
            return await asyncio.gather(*asked)

    assert all(answer.choices[0].message.tool_calls for answer in asyncio.run(ask_all()))


# -- what the model is told ---------------------------------------------------------------------


def rendered(http, **body):
    tokens = http.post("/tokenize", json=body).json()["tokens"]
    return http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]


def test_calls_and_results_are_sent_back(client, hermes):
    (answer,) = ask(client, **guided(CALL)).choices
    (call,) = answer.message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "23"}]}
    messages = [*MESSAGES, answer.message.to_dict(), result]
    assert ask(client, messages=messages, max_tokens=5).choices
    with hermes.client() as http:
        text = rendered(http, messages=messages, tools=TOOLS)
    function = call.function
    said = f'"name": "{function.name}", "arguments": {function.arguments}'
    assert f"<|im_start|>assistant\n<tool_call>\n{{{said}}}\n</tool_call><|im_end|>\n" in text
    assert text.endswith("<|im_start|>tool\n23<|im_end|>\n<|im_start|>assistant\n")
    assert json.dumps(WEATHER["function"]["parameters"]) in text
    assert text.count("get-clock.v2") == 1


def test_arguments_that_are_no_object_are_sent_back_as_they_are(hermes):
    call = {"function": {"name": "f", "arguments": '{"a": '}}
    with hermes.client() as http:
        messages = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}]
        text = rendered(http, messages=messages)
    assert f'"arguments": {json.dumps(call["function"]["arguments"])}' in text


def test_without_a_choice_the_model_is_told_of_no_tools(client, hermes):
    with hermes.client() as http:
        lengths = [len(rendered(http, messages=MESSAGES, tools=t)) for t in (TOOLS, [], None)]
    assert lengths[0] > lengths[1] == lengths[2]
    told, untold, none = (
        ask(client, max_tokens=1, **fields).usage.prompt_tokens
        for fields in ({}, {"tool_choice": "none"}, {"tools": []})
    )
    assert told > untold == none


# -- refusals -----------------------------------------------------------------------------------

NAMED = {"type": "function", "function": {"name": "sms"}}
BAD_SCHEMA = {"type": "function", "function": {"name": "f", "parameters": {"required": "a"}}}
TEXT_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}
CALLED = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tools": [{"type": "retrieval"}]}, "tools", "tools.0.type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "pattern"),
        ({"tools": [TEXT_TOOL]}, "tools", 'must be a schema of type "object"'),
        ({"tools": [WEATHER, WEATHER]}, "tools", "two functions of the name 'weather'"),
        ({"tools": [WEATHER] * 129}, "tools", "at most 128"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tool_choice": "any"}, "tool_choice", "none"),
        ({"tool_choice": NAMED}, "tool_choice", "names 'sms', but tools has only weather, get-clo"),
        (
            {"tools": [BAD_SCHEMA], "tool_choice": "required"},
            "tools",
            "a grammar that cannot be used",
        ),
        ({"response_format": FORM}, "response_format", "no room for calls"),
        (
            {"tool_choice": "required", **guided("a")},
            "guided_regex",
            "set tool_choice to none",
        ),
        (
            {"tool_choice": "required", "extra_body": {"ignore_eos": True}},
            "tool_choice",
            "ignore_eos",
        ),
        ({"messages": [CALLED]}, "messages", "messages[0].tool_calls[0] must have arguments"),
        ({"messages": [{**CALLED, "tool_calls": [{}]}]}, "messages", "a function with a name"),
        ({"messages": [{**CALLED, "tool_calls": "f"}]}, "messages", "a list of tool_calls"),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_what_cannot_be_is_refused_by_name(client, fields, param, message, streamed):
    with pytest.raises(openai.BadRequestError, match=re.escape(message)) as refused:
        ask(client, stream=streamed, **fields)
    assert refused.value.body["param"] == param


def test_a_form_may_go_with_tools_that_are_not_to_be_called(client):
    (choice,) = ask(client, tool_choice="none", response_format={"type": "json_object"}).choices
    assert choice.message.content.startswith("{")


def test_a_template_without_tools_refuses_them(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        with pytest.raises(openai.BadRequestError, match="takes no tools") as refused:
            ask(client)
        assert refused.value.body["param"] == "tools"
        assert ask(client, tool_choice="none", max_tokens=1).choices
