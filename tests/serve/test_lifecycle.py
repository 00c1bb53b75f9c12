"""How a server starts and ends, and what becomes of requests when its engine dies."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from server_process import (
    PATIENCE,
    engine_of,
    is_running,
    launch,
    start_server,
    wait_for,
)

from pageloom.errors import PageloomError
from pageloom.serve import client as client_module
from pageloom.serve.client import EngineClient, EngineDiedError
from pageloom.serve.run import serve
from pageloom.serve.silence import CHECKS, wait_for_silence

LONG_CONTEXT = "model.max_model_len=16384"
LONG = {"prompt": "a", "max_tokens": 16000, "ignore_eos": True, "temperature": 0}
SHORT = {"prompt": "a", "max_tokens": 4, "temperature": 0}


def error_in(lines) -> dict:
    """The error that a stream ends with."""
    events = [line.removeprefix("data: ") for line in lines if line]
    assert events[-1] == "[DONE]"
    return json.loads(events[-2])["error"]


def test_sigterm_lets_open_requests_finish_and_refuses_new_ones(config):
    body = LONG | {"max_tokens": 2500, "stream": True}
    sets = (LONG_CONTEXT, f"server.drain_seconds={PATIENCE}")
    with start_server(config, *sets) as server, server.client() as client, server.client() as other:
        engine = server.engine_pid()
        with client.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            os.kill(engine, signal.SIGSTOP)  # it must not be done before we have looked
            server.process.terminate()
            wait_for(lambda: other.get("/health").status_code == 503)
            refused = other.post("/v1/completions", json=SHORT)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            os.kill(engine, signal.SIGCONT)
            events = [line.removeprefix("data: ") for line in lines if line]
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
        assert server.wait() == 0
        assert server.log[1:] == []


def test_what_is_open_when_the_drain_is_over_ends_with_an_error(config):
    with start_server(config, LONG_CONTEXT, "server.drain_seconds=0.1") as server:
        engine = server.engine_pid()
        with server.client() as client:
            body = LONG | {"stream": True}
            with client.stream("POST", "/v1/completions", json=body) as stream:
                lines = stream.iter_lines()
                next(lines)
                server.process.terminate()
                assert error_in(lines)["code"] == "engine"
        assert server.wait() == 0
        assert not is_running(engine)
        (said,) = server.log[1:]
        assert "1 request still open after 0.1 seconds (server.drain_seconds)" in said


def test_a_second_signal_ends_the_server_at_once(config):
    with start_server(config, LONG_CONTEXT, "server.drain_seconds=3600") as server:
        engine = server.engine_pid()
        with server.client() as client, server.client() as other:
            body = LONG | {"stream": True}
            with client.stream("POST", "/v1/completions", json=body) as stream:
                next(stream.iter_lines())
                server.process.send_signal(signal.SIGINT)
                wait_for(lambda: other.get("/health").status_code == 503)
                server.process.terminate()
                assert server.wait() == 128 + signal.SIGTERM
        wait_for(lambda: not is_running(engine))
        assert "Traceback" not in "\n".join(server.log)


def test_when_the_engine_is_killed_every_client_hears_of_it_and_the_server_fails(config):
    def ask(number: int) -> str:
        body = LONG | {"prompt": f"{number}", "stream": number % 2 == 0}
        with server.client() as client:
            if not body["stream"]:
                answer = client.post("/v1/completions", json=body)
                assert answer.status_code == 503
                return answer.json()["error"]["code"]
            with client.stream("POST", "/v1/completions", json=body) as stream:
                if stream.status_code == 503:  # it had not begun
                    return json.loads(stream.read())["error"]["code"]
                return error_in(stream.iter_lines())["code"]

    with start_server(config, LONG_CONTEXT) as server, ThreadPoolExecutor(24) as clients:
        asked = [clients.submit(ask, number) for number in range(24)]
        wait_for(lambda: server.metric("pageloom_open_requests") == 24)
        engine = server.engine_pid()
        os.kill(engine, signal.SIGKILL)
        assert [each.result() for each in asked] == ["engine"] * 24
        assert server.wait() == 1
        assert server.log[1:] == [f"ERROR: the engine process (pid {engine}) was ended by SIGKILL"]


def test_an_engine_that_is_to_come_back_does_and_ends_with_its_server(config):
    with (
        start_server(config, LONG_CONTEXT, "server.restart_engine=true") as server,
        server.client() as client,
        server.client() as other,
    ):
        with client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            os.kill(server.engine_pid(), signal.SIGKILL)
            assert error_in(lines)["code"] == "engine"
        assert other.get("/health").status_code == 503
        refused = other.post("/v1/completions", json=SHORT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine")
        assert other.get("/metrics").status_code == 503
        wait_for(lambda: other.get("/health").status_code == 200)
        assert client.post("/v1/completions", json=SHORT).status_code == 200
        engine = server.engine_pid()
        server.process.kill()
        wait_for(lambda: not is_running(engine))


def test_an_engine_that_hangs_is_ended_and_every_client_hears_of_it(config):
    """Whatever has come before, the next requests wait for it in vain."""
    sets = (LONG_CONTEXT, "server.engine_timeout_seconds=10", "server.restart_engine=true")
    with start_server(config, *sets) as server, server.client(timeout=PATIENCE) as client:
        engine = server.engine_pid()
        with client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            os.kill(engine, signal.SIGSTOP)
            with server.client(timeout=PATIENCE) as other:
                refused = other.post("/v1/completions", json=SHORT)
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine")
            assert error_in(lines)["code"] == "engine"
        wait_for(lambda: len(server.log) >= 3)
        assert not is_running(engine)
        assert server.log[1:3] == [
            "ERROR: the engine process has answered nothing for 10 seconds "
            "(server.engine_timeout_seconds)",
            f"ERROR: the engine process (pid {engine}) was ended by SIGKILL",
        ]
        wait_for(lambda: client.get("/health").status_code == 200)
        assert client.post("/v1/completions", json=SHORT).status_code == 200


def test_what_cannot_even_be_killed_keeps_nobody_waiting(config, monkeypatch):
    """As a process within a call of a driver."""
    monkeypatch.setattr(client_module, "LAST_BREATH", 0.1)
    monkeypatch.setattr(client_module, "PATIENCE", 0.1)
    killed = []

    async def hang() -> None:
        client = EngineClient(str(config), timeout=2)
        await client.start()
        with monkeypatch.context() as patched:
            patched.setattr(client, "kill", lambda: killed.append(client.pid))
            os.kill(client.pid, signal.SIGSTOP)
            with pytest.raises(EngineDiedError):
                await client.inspect()
            await asyncio.wait_for(client.died.wait(), PATIENCE)
        assert killed
        assert not client.is_alive
        client.kill()
        await client.stop()

    asyncio.run(hang())


def test_only_what_was_asked_in_vain_all_the_time_counts_as_silence():
    heard, asked = [], []

    def ask() -> None:
        asked.append(len(heard))
        if len(asked) in (1, 3, 8):
            heard.append("an answer")

    asyncio.run(wait_for_silence(ask, lambda: len(heard), seconds=0.08))
    assert len(asked) == 8 + CHECKS


def test_an_engine_that_cannot_start_is_one_clear_error(config):
    process = launch(config, ["kv_cache.memory=1"])
    _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2
    assert said.startswith("pageloom: no KV block fits: kv_cache.memory leaves 1 bytes")
    assert said.count("\n") == 1


def test_sigterm_while_the_model_loads_leaves_nothing_behind(config):
    process = launch(config, [])
    engine = engine_of(process.pid)
    process.terminate()
    _, said = process.communicate(timeout=PATIENCE)
    assert (process.returncode, said) == (0, "")
    assert not is_running(engine)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("server.host=192.0.2.1", "cannot listen on 192.0.2.1 port 8000"),
        ("server.host=no.such.host.invalid", "host no.such.host.invalid is no address of this"),
        ("server.api_key_file=/nowhere", "server.api_key_file /nowhere cannot be read"),
    ],
)
def test_what_cannot_be_had_is_said_before_the_model_loads(config, override, message):
    with pytest.raises(PageloomError, match=message):
        serve(str(config), [override])


def test_a_port_in_use_is_one_clear_error(config, server):
    port = httpx.URL(server.url).port
    with pytest.raises(PageloomError, match=f"cannot listen on 127.0.0.1 port {port}: Address al"):
        serve(str(config), [f"server.port={port}"])
