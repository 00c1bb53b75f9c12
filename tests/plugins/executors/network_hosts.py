"""Machines for tests, made of network namespaces: each has an address of its own, and nothing that
runs on one is reached from the other but through the network."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

_CLONE_NEWNET = 0x40000000  # of <linux/sched.h>
SUBNET = "10.213.77"


@dataclass
class Host:
    """A machine named ``name``, which is ``address``."""

    name: str
    address: str
    started: list[subprocess.Popen[Any]] = field(default_factory=list)

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """A process on this machine, which ends with it."""
        process = subprocess.Popen(["ip", "netns", "exec", self.name, *command], **options)
        self.started.append(process)
        return process

    def answers_on(self, port: int) -> bool:
        """Whether something on this machine takes connections at a TCP port."""

        def connect() -> bool:
            try:
                socket.create_connection((self.address, port), timeout=5).close()
            except OSError:
                return False
            return True

        with self.threads(1) as thread:
            return thread.submit(connect).result()

    def threads(self, count: int) -> ThreadPoolExecutor:
        """Threads whose sockets are of this machine."""
        return ThreadPoolExecutor(count, initializer=self._enter)

    def cut_power(self) -> None:
        """End all that runs on it at once."""
        while pids := _ip("netns", "pids", self.name).split():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.05)
        for process in self.started:
            process.wait()
        self.started.clear()

    def _enter(self) -> None:
        with open(f"/run/netns/{self.name}") as namespace:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two machines that are connected. Raises `PermissionError` where they cannot be made."""
    name = f"pageloom{os.getpid()}"
    hosts = [Host(f"{name}{side}", f"{SUBNET}.{n}") for n, side in ((1, "a"), (2, "b"))]
    made: list[Host] = []
    try:
        for host in hosts:
            _ip("netns", "add", host.name)
            made.append(host)
        first, second = hosts
        ends = (
            "eth0",
            "netns",
            first.name,
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            second.name,
        )
        _ip("link", "add", *ends)
        for host in hosts:
            _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", host.name, "link", "set", device, "up")
        yield first, second
    finally:
        for host in made:
            host.cut_power()
            _ip("netns", "delete", host.name)


def why_not() -> str:
    """Why there can be no such machines here; empty if there can."""
    try:
        with two_hosts():
            return ""
    except (PermissionError, FileNotFoundError) as error:
        return f"no network namespaces: {error}"


def wait_until(condition: Callable[[], object], seconds: float = 240.0) -> None:
    """Returns once ``condition`` holds; fails if it does not for so long."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "what was waited for does not come"
        time.sleep(0.1)


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise PermissionError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout
