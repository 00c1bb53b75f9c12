"""``/v1/chat/completions``, as the `openai` client drives it."""

from __future__ import annotations

import asyncio

import openai
import pytest

from pageloom import SamplingParams
from pageloom.serve.protocol import ChatCompletionRequest

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "héllo"},
]
GREEDY = {"temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def chat(client, **fields):
    return client.chat.completions.create(
        **{"model": "tiny", "messages": MESSAGES} | GREEDY | fields
    )


def said(offline, messages=MESSAGES, **params):
    prompt = offline.render_chat(messages)
    return offline.generate(prompt, SamplingParams(**{**GREEDY, **params}))[0].outputs


def test_the_answer_is_the_engine_s(client, offline):
    answer = chat(client)
    (choice,), (output,) = answer.choices, said(offline)
    assert (choice.message.role, choice.message.content) == ("assistant", output.text)
    assert choice.finish_reason == output.finish_reason == "length"
    assert choice.message.refusal is None
    assert choice.message.tool_calls is None
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.usage.prompt_tokens == len(offline.render_chat(MESSAGES))
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


def test_all_there_is_room_for_is_the_default(client, offline):
    messages = [{"role": "user", "content": "a" * 900}]
    answer = chat(client, messages=messages, max_tokens=None, logit_bias={"35": 100})
    (output,) = said(offline, messages, logit_bias={35: 100}, max_tokens=None)
    assert answer.choices[0].message.content == output.text
    assert answer.usage.total_tokens == offline.info.max_model_len


def test_the_newer_name_of_max_tokens_comes_first(client):
    assert chat(client, max_completion_tokens=3).usage.completion_tokens == 3


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_adds_up_to_the_answer(client, offline, n):
    fields = {"n": n, "temperature": 1, "seed": 3}
    texts = dict.fromkeys(range(n), "")
    reasons, first = {}, set()
    for chunk in chat(client, stream=True, **fields):
        (choice,) = chunk.choices
        assert chunk.object == "chat.completion.chunk"
        assert (choice.delta.role == "assistant") == (choice.index not in first)
        first.add(choice.index)
        assert choice.index not in reasons
        texts[choice.index] += choice.delta.content or ""
        if choice.finish_reason:
            reasons[choice.index] = choice.finish_reason
    outputs = said(offline, **fields)
    assert list(texts.values()) == [output.text for output in outputs]
    assert [reasons[index] for index in range(n)] == [output.finish_reason for output in outputs]


def test_the_client_s_own_reader_of_streams_agrees(client, offline):
    body = {"stop_token_ids": [said(offline)[0].token_ids[7]]}
    with client.chat.completions.stream(
        model="tiny", messages=MESSAGES, extra_body=body, **GREEDY
    ) as stream:
        content = "".join(event.delta for event in stream if event.type == "content.delta")
        (choice,) = stream.get_final_completion().choices
    (output,) = said(offline, **body)
    assert choice.message.content == content == output.text
    assert choice.finish_reason == output.finish_reason == "stop"


def test_many_async_clients_at_once(server, offline):
    texts = [f"question {number}" for number in range(6)]

    async def ask(client, text):
        content = ""
        async for chunk in await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": text}], stream=True, **GREEDY
        ):
            content += chunk.choices[0].delta.content or ""
        return content

    async def ask_all():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            return await asyncio.gather(*(ask(client, text) for text in texts))

    expected = [said(offline, [{"role": "user", "content": text}])[0].text for text in texts]
    assert asyncio.run(ask_all()) == expected


@pytest.mark.parametrize("streamed", [False, True])
def test_logprobs_have_the_true_bytes(client, offline, streamed):
    fields = {"logprobs": True, "top_logprobs": 3, "temperature": 1, "seed": 9}
    if streamed:
        entries = []
        for chunk in chat(client, stream=True, **fields):
            if chunk.choices[0].logprobs:
                entries += chunk.choices[0].logprobs.content
    else:
        entries = chat(client, **fields).choices[0].logprobs.content
    (output,) = said(offline, temperature=1, seed=9, logprobs=3)
    assert len(entries) == len(output.token_ids) == 12
    for entry, score in zip(entries, output.logprobs, strict=True):
        assert entry.logprob == pytest.approx(score.logprob, abs=1e-4)
        tops = [top.logprob for top in entry.top_logprobs]
        assert tops == pytest.approx([value for _, value in score.top], abs=1e-4)
    special = offline.tokenizer.all_special_tokens
    shown = [bytes(entry.bytes) for entry in entries if entry.token not in special]
    assert b"".join(shown).decode(errors="replace") == output.text


def test_logprobs_alone_have_no_likeliest(client):
    entries = chat(client, logprobs=True).choices[0].logprobs.content
    assert [entry.top_logprobs for entry in entries] == [[]] * 12
    assert chat(client).choices[0].logprobs is None


def test_a_last_message_is_continued(client, offline):
    """With what was begun in it, the prompt is what it is without the end of the message."""
    begun = [*MESSAGES, {"role": "assistant", "content": "It is"}]
    body = {"continue_final_message": True}
    answer = chat(client, messages=begun, extra_body=body)
    prompt = offline.render_chat(MESSAGES) + offline.encode("It is")
    (output,) = offline.generate(prompt, SamplingParams(**GREEDY))[0].outputs
    assert answer.choices[0].message.content == output.text
    assert answer.usage.prompt_tokens == len(prompt)


def test_the_prompt_may_end_with_the_last_message(client, offline):
    whole = chat(client).usage.prompt_tokens
    answer = chat(client, extra_body={"add_generation_prompt": False})
    assert whole - answer.usage.prompt_tokens == len(offline.encode("<|im_start|>assistant\n"))


def test_parts_of_text_are_one_text(client):
    parts = [{"type": "text", "text": "hé"}, {"type": "text", "text": "llo"}]
    messages = [MESSAGES[0], {"role": "user", "content": parts}]
    whole = chat(client).choices[0].message.content
    assert chat(client, messages=messages).choices[0].message.content == whole


def test_an_answer_can_be_sent_back_as_it_came(client):
    answer = chat(client).choices[0].message
    messages = [*MESSAGES, answer, {"role": "user", "content": "go on", "name": "me"}]
    assert chat(client, messages=messages).choices[0].message.content


def test_beams(client, offline):
    answer = chat(client, n=2, extra_body={"use_beam_search": True, "best_of": 4})
    expected = [output.text for output in said(offline, beam_width=4, n=2)]
    assert [choice.message.content for choice in answer.choices] == expected


def test_fields_that_ask_for_nothing_are_taken(client):
    harmless = {
        "store": False,
        "metadata": {"job": "7"},
        "service_tier": "auto",
        "modalities": ["text"],
        "verbosity": "medium",
        "prompt_cache_key": "a",
        "safety_identifier": "b",
        "user": "c",
    }
    whole = chat(client).choices[0].message.content
    assert chat(client, **harmless).choices[0].message.content == whole


def test_null_is_as_absent(client):
    nulls = dict.fromkeys(ChatCompletionRequest.model_fields.keys() - {"model", "messages"})
    answer = chat(client, extra_body=nulls | GREEDY)
    assert answer.choices[0].message.content == chat(client).choices[0].message.content


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"store": True}, "store", "False"),
        ({"service_tier": "flex"}, "service_tier", "auto"),
        ({"modalities": ["audio"]}, "modalities", "text"),
        ({"verbosity": "low"}, "verbosity", "medium"),
        ({"reasoning_effort": "low"}, "reasoning_effort", "no field"),
        ({"web_search_options": {}}, "web_search_options", "no field"),
        ({"prompt_cache_retention": "24h"}, "prompt_cache_retention", "in_memory"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
        ({"best_of": 2}, "best_of", "beam"),
        ({"echo": True}, "echo", "no field"),
        ({"chat_template": "{{ x }}"}, "chat_template", "no field"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs", "variable"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "variable"),
        ({"add_generation_prompt": True, "continue_final_message": True}, None, "leave out"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"content": "a"}]}, "messages", "role"),
        ({"messages": [{"role": "user"}]}, "messages", "content"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages", "text or a list"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "image"),
        ({"max_tokens": 0}, "max_tokens", "1"),
    ],
    ids=lambda value: None,
)
@pytest.mark.parametrize("streamed", [False, True])
def test_what_cannot_be_is_refused_by_name(client, fields, param, message, streamed):
    with pytest.raises(openai.BadRequestError, match=message) as raised:
        chat(client, stream=streamed, extra_body=fields)
    assert param is None or raised.value.param == param
    assert raised.value.type == "invalid_request_error"
