"""A model over two machines that make up a Ray cluster, and what happens when one is lost."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import DEVNULL, PIPE
from tempfile import TemporaryDirectory

import httpx
import pytest
from network_hosts import Host, two_hosts, wait_until, why_not

pytest.importorskip("ray")
openai = pytest.importorskip("openai")

ROOT = Path(__file__).parent.parent.parent.parent
RAY = str(Path(sysconfig.get_path("scripts")) / "ray")
RAY_PORT = 6379
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "RAY_AUTH_MODE": "disabled",  # the two have the same home, but real machines do not
    "RAY_USAGE_STATS_ENABLED": "0",
}
QUESTION = {
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "model": "SmolLM2-135M-Instruct.Q4_1.gguf",
    "temperature": 0,
}


@pytest.fixture(autouse=True)
def _folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where Ray keeps its files."""
    with TemporaryDirectory(prefix="ray") as folder:
        monkeypatch.setitem(ENVIRONMENT, "RAY_TMPDIR", folder)
        yield


def join(host: Host, *options: str) -> None:
    """Make ``host`` a node of the cluster, with room for one rank."""
    host.start(
        [
            *(RAY, "start", "--block", f"--node-ip-address={host.address}", "--num-cpus=1"),
            *("--object-store-memory=100000000", "--include-log-monitor=false", *options),
        ],
        env=ENVIRONMENT,
        stdout=DEVNULL,
        stderr=DEVNULL,
    )


class Server:
    """``pageloom serve`` on a host."""

    def __init__(self, host: Host, *overrides: str) -> None:
        sets = [part for override in overrides for part in ("--set", override)]
        self.url, self.log = "", []
        self.process = host.start(
            [sys.executable, "-m", "pageloom", "serve", "configs/smollm2.yaml", *sets],
            env=ENVIRONMENT,
            cwd=ROOT,
            stderr=PIPE,
            text=True,
        )
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()
        wait_until(lambda: self.url or self.process.poll() is not None)
        assert self.url, "\n".join(self.log)

    def _read(self) -> None:
        for line in self.process.stderr:
            self.log.append(line.rstrip("\n"))
            if found := re.search(r"served at (http://\S+)/v1", line):
                self.url = found[1]


@contextmanager
def client_of(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=240
    ) as client:
        yield client


def tell(server: Server, max_tokens: int) -> str:
    with client_of(server) as client:
        answer = client.chat.completions.create(**QUESTION, max_tokens=max_tokens)
        return answer.choices[0].message.content


def listen(server: Server, begun: threading.Event) -> str:
    """What ends a stream that goes on and on."""
    with client_of(server) as client:
        stream = client.chat.completions.create(
            **QUESTION, max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
        )
        try:
            for _ in stream:
                begun.set()
        except openai.APIError as error:
            return str(error)
        return "its end"


def status(server: Server) -> int:
    return httpx.get(f"{server.url}/health", timeout=240).status_code


@pytest.mark.skipif(bool(reason := why_not()), reason=reason)
def test_a_machine_is_lost_and_comes_back():
    with two_hosts() as (first, second), first.threads(2) as clients:
        cluster = f"{first.address}:{RAY_PORT}"
        join(first, "--head", f"--port={RAY_PORT}", "--include-dashboard=false")
        wait_until(lambda: first.answers_on(RAY_PORT))
        join(second, f"--address={cluster}")
        server = Server(
            first,
            *(f"server.host={first.address}", "server.restart_engine=true"),
            *("parallel.executor=ray", f"parallel.options.address={cluster}"),
            *("parallel.tensor_parallel_size=2", "parallel.options.strategy=STRICT_SPREAD"),
            *("runtime.num_threads=1", "model.max_model_len=4096"),
        )
        told = clients.submit(tell, server, 20).result()
        assert "Paris" in told

        begun = threading.Event()
        stream = clients.submit(listen, server, begun)
        assert begun.wait(240)
        second.cut_power()
        assert "the engine has stopped; the request was not finished" in stream.result(240)
        assert clients.submit(status, server).result() == 503
        said = "\n".join(server.log)
        assert f"rank 1 (stage 0, tensor rank 1) at {second.address}" in said

        join(second, f"--address={cluster}")
        wait_until(lambda: clients.submit(status, server).result() == 200)
        assert clients.submit(tell, server, 20).result() == told
        server.process.terminate()
        assert server.process.wait(240) == 0
