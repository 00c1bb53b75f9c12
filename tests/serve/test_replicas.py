"""One server with two engines, which a client takes for one."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from server_process import PATIENCE, ServerProcess, start_server, wait_for

from pageloom import SamplingParams
from pageloom.config import load_config
from pageloom.errors import PageloomError
from pageloom.serve import worker
from pageloom.serve.engines import make_engines
from pageloom.serve.replicas_cards import environments, visible_cards

TWO = "parallel.replicas=2"
LONG = {"prompt": "a", "max_tokens": 900, "ignore_eos": True, "temperature": 0}


def children_of(server: ServerProcess) -> list[int]:
    found = subprocess.run(
        ["pgrep", "-P", str(server.process.pid)], capture_output=True, text=True
    ).stdout
    return [int(pid) for pid in found.split()]


def open_requests(server: ServerProcess) -> dict[str, float]:
    """By replica."""
    text = server.client().get("/metrics").text
    return {
        line.split('"')[1]: float(line.split()[1])
        for line in text.splitlines()
        if line.startswith("pageloom_replica_open_requests{")
    }


def test_answers_are_those_of_one_engine_also_while_another_comes_back(config, offline):
    prompts = [f"{number} apples" for number in range(8)]
    body = {"prompt": prompts, "max_tokens": 12, "temperature": 0}
    params = SamplingParams(max_tokens=12, temperature=0)
    wanted = [output.outputs[0].text for output in offline.generate(prompts, params)]
    overrides = (TWO, "parallel.routing=round_robin", "server.restart_engine=true")
    with start_server(config, *overrides) as server, server.client() as client:

        def answers() -> list[str]:
            choices = client.post("/v1/completions", json=body).json()["choices"]
            return [choice["text"] for choice in choices]

        assert answers() == wanted
        server.wait_until_idle()
        metrics = client.get("/metrics").text
        for replica in "01":
            assert f'pageloom_generation_tokens_total{{replica="{replica}"}} 48.0' in metrics
        before = children_of(server)
        os.kill(before[0], signal.SIGKILL)
        wait_for(lambda: "pageloom_replicas 1.0" in client.get("/metrics").text)
        assert answers() == wanted
        wait_for(lambda: "pageloom_replicas 2.0" in client.get("/metrics").text)
        assert len(set(children_of(server)) - set(before)) == 1
        assert answers() == wanted


def test_when_an_engine_is_killed_the_other_answers_and_with_it_the_server_ends(config):
    def listen(begun: threading.Event) -> str:
        """The last event of a stream."""
        body = LONG | {"max_tokens": 6000, "stream": True}
        with server.client() as own, own.stream("POST", "/v1/completions", json=body) as stream:
            events = []
            for line in stream.iter_lines():
                begun.set()
                events += [line.removeprefix("data: ")] if line else []
            return events[-2]

    def ask(number: int) -> int:
        with server.client(timeout=PATIENCE) as own:
            body = LONG | {"prompt": f"{number}", "max_tokens": 4}
            return own.post("/v1/completions", json=body).status_code

    overrides = (TWO, "scheduler.max_num_seqs=1", "model.max_model_len=16384")
    with (
        start_server(config, *overrides) as server,
        ThreadPoolExecutor(6) as clients,
        server.client() as client,
    ):
        begun = [threading.Event(), threading.Event()]
        streams = [clients.submit(listen, event) for event in begun]
        assert all(event.wait(PATIENCE) for event in begun)
        waiting = [clients.submit(ask, number) for number in range(4)]
        wait_for(lambda: sorted(open_requests(server).values()) == [3.0, 3.0])
        first, second = children_of(server)
        os.kill(first, signal.SIGKILL)
        assert [each.result() for each in waiting] == [200] * 4
        last = [json.loads(each.result()) for each in streams]
        assert [event["error"]["code"] for event in last if "error" in event] == ["engine"]
        assert client.get("/health").status_code == 200
        os.kill(second, signal.SIGKILL)
        assert server.wait() == 1


def test_an_engine_more_is_started_when_requests_queue_up_and_takes_the_next(config):
    def ask(max_tokens: int) -> int:
        with server.client(timeout=PATIENCE) as own:
            body = LONG | {"max_tokens": max_tokens}
            return own.post("/v1/completions", json=body).status_code

    overrides = ("parallel.max_replicas=2", "scheduler.max_num_seqs=1", "server.drain_seconds=0")
    with (
        start_server(config, *overrides, "model.max_model_len=16384") as server,
        ThreadPoolExecutor(8) as clients,
        server.client() as client,
    ):
        assert len(children_of(server)) == 1
        asked = [clients.submit(ask, 16_000) for _ in range(8)]
        wait_for(lambda: "pageloom_replicas 2.0" in client.get("/metrics").text)
        assert len(children_of(server)) == 2
        assert ask(4) == 200
        server.end()
        assert {each.result() for each in asked} <= {200, 503}


def test_prefix_routing_has_more_cache_hits_than_round_robin(config, tmp_path):
    # Nine prefixes of 16 blocks: too many for the 100 blocks of one engine, but not of two.
    small = ("kv_cache.memory=800KiB", "scheduler.max_num_seqs=2", TWO)
    with (
        start_server(config, *small) as by_prefix,
        start_server(config, *small, "parallel.routing=round_robin") as in_turn,
    ):
        out = tmp_path / "run.json"
        result = subprocess.run(
            [
                *(sys.executable, "-m", "pageloom", "bench", "serve"),
                *("--url", f"prefix={by_prefix.url}", "--url", f"turn={in_turn.url}"),
                *("--requests", "72", "--prompt-tokens", "4:20", "--output-tokens", "2:6"),
                *("--prefix-tokens", "256", "--prefix-groups", "9", "--vocab-size", "259"),
                *("--warm-up", "0", "--json", str(out)),
            ],
            capture_output=True,
            text=True,
        )
    assert result.returncode == 0, result.stderr
    summary = {row["metric"]: row["values"] for row in json.loads(out.read_text())["summary"]}
    shares = summary["cached_share"]
    assert shares["prefix"] > 0.7
    assert shares["prefix"] > shares["turn"] + 0.2


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["parallel.replicas=3", "parallel.max_replicas=2"], "parallel.max_replicas is 2, less"),
        ([TWO, "runtime.device=cuda:1"], "runtime.device is cuda:1, which is one card, but there"),
    ],
)
def test_what_cannot_be_is_one_clear_error(config, overrides, said):
    with pytest.raises(PageloomError, match=said):
        make_engines(load_config(config, overrides), str(config), overrides)


def test_each_replica_has_cards_of_its_own(config, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7,8")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 5)
    of = ["runtime.device=cuda", "parallel.tensor_parallel_size=2"]
    found = environments(load_config(config, of), 2)
    assert [each["CUDA_VISIBLE_DEVICES"] for each in found] == ["4,5", "6,7"]
    with pytest.raises(PageloomError, match=r"3 replicas of 2 ranks need 6 cards, but .* has 5"):
        environments(load_config(config, of), 3)
    assert environments(load_config(config, [*of, "parallel.executor=ray"]), 3) == [{}, {}, {}]
    assert environments(load_config(config, ["runtime.device=cpu"]), 9) == [{}] * 9


@pytest.mark.parametrize(
    ("given", "found", "cards"),
    [
        ("-1", 8, []),
        ("", 8, []),
        ("3,-1,2", 8, ["3"]),
        ("3,,2", 8, ["3"]),
        ("GPU-1f,MIG-2e", 8, ["GPU-1f", "MIG-2e"]),
        ("0,1,9", 2, ["0", "1"]),
        ("0,1", 0, []),
        (None, 2, ["0", "1"]),
        (None, 0, []),
    ],
)
def test_cards_are_those_that_cuda_finds(monkeypatch, given, found, cards):
    if given is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    monkeypatch.setattr("torch.cuda.device_count", lambda: found)
    assert visible_cards() == cards


def test_an_engine_knows_of_the_others_that_the_server_makes(config, monkeypatch, caplog):
    """So that it leaves them their part of the memory."""
    built = []

    def assemble(config):
        built.append(config.parallel.most_replicas)
        raise PageloomError("no more is needed")

    monkeypatch.setattr("pageloom.engine.assemble.assemble", assemble)
    near, far = socket.socketpair()
    with near, far:
        assert worker.serve(near, str(config), ["parallel.replicas=3"]) == 2
    assert built == [3]
    assert caplog.records == []
