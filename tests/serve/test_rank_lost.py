"""What becomes of requests when a rank of the server's engine dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor

from server_process import PATIENCE, is_running, start_server, wait_for

SETTINGS = ("model.max_model_len=16384", "parallel.tensor_parallel_size=2")
LONG = {"prompt": "a", "max_tokens": 16000, "ignore_eos": True, "temperature": 0}
SHORT = {"prompt": "a", "max_tokens": 4, "temperature": 0}


def ranks_of(engine: int) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(engine)], capture_output=True, text=True)
    return sorted(int(pid) for pid in found.stdout.split())


def ask(server, number: int) -> int | str:
    """The status of an answer, 503 too if a stream had not begun; "error" for one that ends so."""
    body = LONG | {"prompt": f"{number}", "stream": number % 2 == 0}
    with server.client(timeout=PATIENCE) as client:
        if not body["stream"]:
            return client.post("/v1/completions", json=body).status_code
        with client.stream("POST", "/v1/completions", json=body) as stream:
            if stream.status_code != 200:
                return stream.status_code
            events = [line.removeprefix("data: ") for line in stream.iter_lines() if line]
    assert events[-1] == "[DONE]"
    return next(iter(json.loads(events[-2])))


def test_when_a_rank_is_killed_every_client_hears_of_it_and_the_server_fails(config):
    with start_server(config, *SETTINGS) as server, ThreadPoolExecutor(8) as clients:
        engine = server.engine_pid()
        ranks = ranks_of(engine)
        assert len(ranks) == 2
        asked = [clients.submit(ask, server, number) for number in range(8)]
        wait_for(lambda: server.metric("pageloom_open_requests") == 8)
        os.kill(ranks[1], signal.SIGKILL)
        answers = [each.result() for each in asked]
        assert set(answers[0::2]) <= {"error", 503}
        assert {status // 100 for status in answers[1::2]} == {5}
        assert server.wait() == 1
        assert f"pid {ranks[1]}) was ended by SIGKILL" in "\n".join(server.log)
        assert "Traceback" not in "\n".join(server.log)
        wait_for(lambda: not any(map(is_running, [engine, *ranks])))


def test_an_idle_engine_that_loses_a_rank_comes_back_if_it_is_to(config):
    """And all of its processes end with the server, were it killed."""
    with (
        start_server(config, *SETTINGS, "server.restart_engine=true") as server,
        server.client(timeout=PATIENCE) as client,
    ):
        assert client.post("/v1/completions", json=SHORT).status_code == 200
        first = server.engine_pid()
        ranks = ranks_of(first)
        os.kill(ranks[0], signal.SIGKILL)
        wait_for(lambda: client.get("/health").status_code == 503)
        wait_for(lambda: client.get("/health").status_code == 200)
        assert client.post("/v1/completions", json=SHORT).status_code == 200
        wait_for(lambda: not any(map(is_running, [first, *ranks])))
        second = server.engine_pid()
        ranks = ranks_of(second)
        assert len(ranks) == 2
        server.process.kill()
        wait_for(lambda: not any(map(is_running, [second, *ranks])))
