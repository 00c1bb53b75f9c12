"""What runs in the Ray actor of one rank. All that goes in and out is numbers, text and bytes, so
that nothing is pickled but by Ray itself."""

from __future__ import annotations

import logging
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from pageloom.contract import Blueprint, Worker
from pageloom_executors.wire import Allocated, Done, Failed, FromRank, Ready, Refused, one_line

log = logging.getLogger(__name__)

_SIOCGIFADDR = 0x8915  # of <linux/sockios.h>
_ADDRESS = slice(20, 24)  # of a struct ifreq with an IPv4 address


class RankActor:
    """One rank. Its calls are computed one after the other, but those of the concurrency group
    "watch", which are answered meanwhile."""

    def __init__(self, blueprint: str, index: int, log_level: int) -> None:
        """The rank ``index`` of the blueprint, a text."""
        logging.getLogger("pageloom").setLevel(log_level)
        self._blueprint = Blueprint.load(blueprint)
        self._rank = self._blueprint.rank(index)
        self._worker: Worker | None = None
        self._store: Any = None
        self._doing: Callable[[], str] = lambda: "starts"

    def where(self) -> tuple[str, int]:
        """The address of its machine, and the process."""
        return _address(), os.getpid()

    def open_store(self) -> int:
        """Where all ranks meet: the port, on this machine. For one rank only."""
        from pageloom_executors.group import open_store

        self._store = open_store(_address(), 0, is_master=True)
        return int(self._store.port)

    def load(self, host: str, port: int, num_threads: int) -> bytes:
        """Meet the others at this address and load the model: `Ready`, `Refused` or `Failed`."""
        return self._reply(lambda: self._load(host, port, num_threads))

    def allocate(self, num_blocks: int, host_blocks: int) -> bytes:
        """`Allocated`, `Refused` or `Failed`."""

        def allocate() -> FromRank:
            try:
                self._loaded.allocate(num_blocks, host_blocks)
            except ValueError as error:
                return Refused(str(error))
            return Allocated()

        return self._reply(allocate)

    def run(self, step: bytes) -> bytes:
        """`Done` or `Failed`."""
        return self._reply(lambda: Done(self._loaded.run_packed(step)))

    def live(self) -> None:
        """Does not return."""
        threading.Event().wait()

    def doing(self) -> str:
        """What goes on, such as "waits for other ranks in send"."""
        return self._doing()

    @property
    def _loaded(self) -> Worker:
        if self._worker is None:
            raise RuntimeError("no model is loaded")
        return self._worker

    def _load(self, host: str, port: int, num_threads: int) -> FromRank:
        import torch

        from pageloom_executors.group import connect, open_store

        self._doing = lambda: "waits for other ranks"
        torch.set_num_threads(num_threads)
        device = torch.device("cuda", 0) if self._on_card else torch.device("cpu")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        for library in ("GLOO", "NCCL"):
            if (interface := interface_of(_address())) is not None:
                os.environ.setdefault(f"{library}_SOCKET_IFNAME", interface)
        if self._store is None:
            timeout = self._blueprint.timeout_seconds
            self._store = open_store(host, port, is_master=False, timeout_seconds=timeout)
        group = connect(self._rank, self._store, device, self._blueprint.timeout_seconds)
        self._doing = lambda: group.doing or "loads the model"
        try:
            self._worker = self._blueprint.build(group, str(device))
        except ValueError as error:
            return Refused(str(error))
        self._doing = lambda: group.doing or "computes"
        return Ready(self._worker.report())

    @property
    def _on_card(self) -> bool:
        return self._blueprint.device.startswith("cuda")

    def _reply(self, work: Callable[[], FromRank]) -> bytes:
        from pageloom_executors.group import GroupError

        try:
            reply = work()
        except GroupError as error:
            reply = Failed(str(error), by_others=True)
        except Exception as error:
            log.exception("%s failed", self._rank)
            reply = Failed(one_line(error), by_others=False)
        return msgspec.msgpack.encode(reply)


def decode(reply: bytes) -> Any:
    """What an actor's call returned, a `FromRank`."""
    return msgspec.msgpack.decode(reply, type=FromRank)


def interface_of(address: str) -> str | None:
    """The network interface that has this IPv4 address; None if that is not known here. Without
    it, the libraries that ranks talk by take what the machine's name resolves to, which is often
    an address that other machines cannot reach."""
    if sys.platform != "linux":
        return None
    import fcntl

    wanted = socket.inet_aton(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                found = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)
            except OSError:  # it has none
                continue
            if found[_ADDRESS] == wanted:
                return name
    return None


def _address() -> str:
    import ray.util

    address: str = ray.util.get_node_ip_address()
    return address
