"""Real server processes for the tests."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

ROOT = Path(__file__).parent.parent.parent
PATIENCE = 300.0  # seconds for a server to start or to end on a busy machine


@dataclass
class ServerProcess:
    """``pageloom serve`` in a process of its own. ``log`` is what it has written to stderr."""

    process: subprocess.Popen[str]
    log: list[str] = field(default_factory=list)
    url: str = ""  # http://HOST:PORT, without /v1

    def __post_init__(self) -> None:
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        """Gather the log until the process has closed it."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line.rstrip("\n"))
            if found := re.search(r"served at (http://\S+)/v1", line):
                self.url = found[1]

    def client(self, **options: object) -> httpx.Client:
        return httpx.Client(base_url=self.url, **{"timeout": PATIENCE, **options})

    def metric(self, name: str) -> float:
        """A sample of ``/metrics`` that has no labels."""
        text = httpx.get(f"{self.url}/metrics", timeout=PATIENCE).text
        (line,) = [line for line in text.splitlines() if line.startswith(f"{name} ")]
        return float(line.split()[1])

    def wait_until_idle(self) -> None:
        """Returns when no request is open in the engine and it holds no block."""
        wait_for(
            lambda: (
                not (self.metric("pageloom_open_requests") or self.metric("pageloom_blocks_used"))
            )
        )
        assert self.metric("pageloom_blocks_lost") == 0

    def engine_pid(self) -> int:
        return engine_of(self.process.pid)

    def wait(self) -> int:
        """The exit code, once it and its engines have ended and the log is complete."""
        code = self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        assert not self._reader.is_alive(), "something still holds the log"
        return code

    def end(self) -> int:
        """The exit code; SIGTERM first, if it still runs."""
        if self.process.poll() is None:
            self.process.terminate()
        return self.wait()


def send(
    server: ServerProcess, body: object, path: str = "/v1/completions", receive: int = 1 << 16
) -> socket.socket:
    """A connection that has asked, and reads nothing of the answer; ``receive`` bytes of it are
    kept for whoever does."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
    connection = connect(server, receive)
    connection.sendall(head.encode() + content)
    return connection


def connect(server: ServerProcess, receive: int = 1 << 16) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.settimeout(PATIENCE)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
    connection.connect((host, int(port)))
    return connection


def wait_for(condition: Callable[[], object]) -> None:
    """Returns once ``condition`` holds; fails if it does not within minutes."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "what was waited for does not come"
        time.sleep(0.02)


def engine_of(pid: int) -> int:
    """The engine's process, once a server has one. Libraries that it imports start others."""
    found: list[str] = []
    command = ["pgrep", "--parent", str(pid), "--full", "pageloom.serve.worker"]

    def looked() -> bool:
        found[:] = subprocess.run(command, capture_output=True, text=True).stdout.split()
        return bool(found)

    wait_for(looked)
    return int(found[0])


def is_running(pid: int) -> bool:
    """Whether there is such a process, other than a zombie."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return state.stdout.strip() not in ("", "Z", "Zs")


@contextmanager
def start_server(
    config: Path,
    *overrides: str,
    options: Sequence[str] = (),
    program: Sequence[str] = ("-m", "pageloom"),
) -> Iterator[ServerProcess]:
    """A server that answers, on a port of its own. It is ended on the way out. ``program`` is what
    Python runs."""
    process = launch(config, overrides, options, program)
    server = ServerProcess(process)
    try:
        deadline = time.monotonic() + PATIENCE
        while not server.url:
            assert process.poll() is None, "\n".join(server.log)
            assert time.monotonic() < deadline, "the server does not start"
            time.sleep(0.02)
        yield server
    finally:
        try:
            server.end()
        finally:
            process.kill()


def launch(
    config: Path,
    overrides: Sequence[str],
    options: Sequence[str] = (),
    program: Sequence[str] = ("-m", "pageloom"),
) -> subprocess.Popen[str]:
    sets = [part for override in overrides for part in ("--set", override)]
    return subprocess.Popen(
        [sys.executable, *program, "serve", str(config), "--port", "0", *options, *sets],
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
