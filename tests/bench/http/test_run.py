"""Every request is sent when it is due, and what becomes of it is taken down."""

from __future__ import annotations

import asyncio
import socket

import pytest
from scripted_server import DONE, PATIENCE, Script, event, serve, token, usage

from pageloom.bench.http.run import Settings, named, run_rounds
from pageloom.bench.http.target import Target, parse_targets
from pageloom.bench.serving.trace import TraceRequest
from pageloom.errors import PageloomError

SETTINGS = Settings(timeout=PATIENCE, ignore_eos=True, warm_up=0)


def run(url, requests, settings=SETTINGS, rounds=1, model="first"):
    async def collect():
        targets = [Target("only", f"{url}/v1", model)]
        return [done async for done in run_rounds(targets, [requests] * rounds, settings)]

    return [done["only"] for done in asyncio.run(collect())]


def test_a_request_goes_out_while_those_before_it_are_open():
    answer = (200, [token(), usage(1, 1), DONE])
    with serve(Script({"all": answer}, hold=20)) as script:  # the first waits for the last
        (done,) = run(script.url, [TraceRequest("all", 1, arrival=n / 1000) for n in range(20)])
    assert len(done.succeeded) == 20
    for outcome in done.outcomes:
        assert 0 <= outcome.arrival <= outcome.sent <= outcome.token_times[0] <= outcome.finished
        assert outcome.finished <= done.seconds


def test_what_is_sent_is_what_the_trace_says(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    request = TraceRequest("text", 5, user="someone", priority=3)
    with serve(Script({"text": (200, [token(), usage(2, 5, 1), DONE])})) as script:
        (done,) = run(script.url, [request])
        run(script.url, [TraceRequest("text", 5)], Settings(PATIENCE, False, 0))
    body = {
        "model": "first", "prompt": "text", "max_tokens": 5, "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    assert script.received == [
        {**body, "ignore_eos": True, "user": "someone", "priority": 3}, body
    ]  # fmt: skip
    assert script.keys == ["Bearer secret"] * 2
    (outcome,) = done.outcomes
    assert (outcome.prompt_tokens, outcome.cached_tokens, outcome.output_tokens) == (2, 1, 5)


FAILURES = {
    "status 429": (429, [b'{"error": {"message": "come back later"}}']),
    "status 502": (502, [b"<html>no gateway</html>"]),
    "connection lost": (200, [token(), None]),
    "error in the stream": (200, [token(), event({"error": {"message": "died"}}), DONE]),
    "stream without its end": (200, [token(), usage(1, 2)]),
    "output of another length": (200, [token(), usage(1, 1), DONE]),
    "no output": (200, [usage(1, 0), DONE]),
}


def test_failures_are_told_apart():
    answers = {**FAILURES, "": (200, [token(), token(), usage(1, 2), DONE])}
    with serve(Script(answers)) as script:
        (done,) = run(script.url, [TraceRequest(kind, 2) for kind in answers])
    assert [outcome.error for outcome in done.outcomes] == list(answers)
    assert [outcome.output_tokens for outcome in done.succeeded] == [2]
    details = {outcome.error: outcome.detail for outcome in done.outcomes}
    assert details["status 429"] == "come back later"
    assert "no gateway" in details["status 502"]


def test_nobody_listens():
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        (done,) = run(url, [TraceRequest("a", 1)])
        assert [outcome.error for outcome in done.outcomes] == ["no connection"]
        with pytest.raises(PageloomError, match=f"{url}/v1 does not serve a request of 16 token"):
            run(url, [TraceRequest("a", 1)], Settings(PATIENCE, True, warm_up=1))
        with pytest.raises(PageloomError, match=f"{url}/v1/models does not say"):
            asyncio.run(named(parse_targets([url]), None, SETTINGS))


def test_a_server_that_says_nothing_times_out():
    with serve(Script({"a": (200, [token(), usage(1, 1), DONE])}, hold=2)) as script:
        (done,) = run(script.url, [TraceRequest("a", 1)], Settings(0.2, True, 0))
    assert [outcome.error for outcome in done.outcomes] == ["timeout"]


def test_servers_take_turns_and_another_begins_in_each_round():
    with serve(Script({"a": (200, [token(), usage(1, 1), DONE])})) as script:
        targets = parse_targets([f"{name}={script.url}" for name in "xy"])
        turns = []

        async def collect():
            found = await named(targets, None, SETTINGS)
            trace = [TraceRequest("a", 1)]
            async for _ in run_rounds(
                found,
                [trace] * 3,
                Settings(PATIENCE, True, warm_up=2),
                on_turn=lambda number, target: turns.append((number, target.name)),
            ):
                pass

        asyncio.run(collect())
    assert turns == [(n, name) for n, names in enumerate(("xy", "yx", "xy")) for name in names]
    assert len(script.received) == 6 * 3
    assert {body["model"] for body in script.received} == {"first"}


@pytest.mark.parametrize(
    ("text", "name", "url"),
    [
        ("http://a:8000", "a:8000", "http://a:8000/v1"),
        ("http://a:8000/v1/", "a:8000", "http://a:8000/v1"),
        ("https://b/api/v1", "b", "https://b/api/v1"),
        ("vLLM 1.0=http://a:1/", "vLLM 1.0", "http://a:1/v1"),
    ],
)
def test_a_target_is_a_url_and_perhaps_a_name(text, name, url):
    assert Target.parse(text) == Target(name, url)


@pytest.mark.parametrize("text", ["a:8000", "ftp://a", "=http://a", "http://", "http://a?b=c"])
def test_what_is_no_target(text):
    with pytest.raises(PageloomError, match="must be a URL or NAME=URL"):
        Target.parse(text)


def test_two_targets_of_one_name():
    with pytest.raises(PageloomError, match="two --url are named 'a:1'"):
        parse_targets(["http://a:1", "http://a:1/v1"])
