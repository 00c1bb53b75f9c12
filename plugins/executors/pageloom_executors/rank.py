"""The process of one rank: builds its worker, runs what the engine's process sends, and ends with
that process, whatever it is doing then."""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from pageloom.contract import Blueprint, Worker
from pageloom.contract.framing import Unpacker
from pageloom_executors.wire import (
    MAX_MESSAGE,
    RECEIVE_BYTES,
    Allocate,
    Allocated,
    Done,
    Failed,
    FromRank,
    Log,
    Ping,
    Pong,
    Ready,
    Refused,
    Run,
    Start,
    ToRank,
    one_line,
    pack,
)

if TYPE_CHECKING:
    import torch

log = logging.getLogger("pageloom_executors.rank")  # whatever it runs as

LAST_BREATH = 1.0  # seconds from the end of the connection to that of the process, if it is busy
_PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>


class Link:
    """The connection to the engine's process. A thread of its own reads it, so that it is noticed
    at once when the connection ends, and pings are answered, while the model computes."""

    def __init__(self, connection: socket.socket) -> None:
        self.doing: Callable[[], str] = lambda: "starts"
        self._connection = connection
        self._sending = threading.Lock()
        self._received: queue.SimpleQueue[ToRank | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def receive(self) -> ToRank | None:
        """The next message but pings; None when the connection has ended, whoever asks."""
        message = self._received.get()
        if message is None:
            self._received.put(None)
        return message

    def send(self, message: FromRank) -> None:
        data = pack(message)
        try:
            with self._sending:
                self._connection.sendall(data)
        except OSError:
            pass  # the engine's process is gone, which the other thread learns as well

    def _read(self) -> None:
        unpacker = Unpacker(ToRank, MAX_MESSAGE)
        while data := self._read_some():
            for message in unpacker.feed(data):
                if isinstance(message, Ping):
                    self.send(Pong(self.doing()))
                else:
                    self._received.put(message)
        self._received.put(None)
        time.sleep(LAST_BREATH)
        os._exit(0)  # the main thread may hang

    def _read_some(self) -> bytes:
        try:
            return self._connection.recv(RECEIVE_BYTES)
        except OSError:
            return b""


class LogSender(logging.Handler):
    """Has the engine's process log what is logged here, so that it looks like all else there."""

    def __init__(self, link: Link) -> None:
        super().__init__()
        self._link = link

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._link.send(Log(record.name, record.levelno, self.format(record)))
        except Exception:
            self.handleError(record)


def main() -> None:
    """``python -m pageloom_executors.rank --parent PID --socket FD [--store FD]``"""
    parser = argparse.ArgumentParser()
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--socket", type=int, required=True)
    parser.add_argument("--store", type=int)
    options = parser.parse_args()
    _end_with(options.parent)
    for signum in (signal.SIGINT, signal.SIGTERM):  # the engine's process decides when this ends
        signal.signal(signum, signal.SIG_IGN)
    faulthandler.enable()
    link = Link(socket.socket(fileno=options.socket))
    logging.basicConfig(handlers=[LogSender(link)], format="%(message)s")
    try:
        _serve(link, options.store)
    except Exception as error:
        log.error("%s", traceback.format_exc().rstrip())
        link.send(Failed(one_line(error), by_others=False))
    # Until it is told to, it does not end: other ranks would fail too before this is known.
    while link.receive() is not None:
        pass
    _leave()


def _end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, where there is such a kernel."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it had ended before
        os._exit(1)


def _serve(link: Link, store_fd: int | None) -> None:
    """Returns when the connection has ended, or once it is told why the rank cannot go on."""
    start = link.receive()
    if not isinstance(start, Start):
        return
    sys.path[:] = start.search_path
    for name, level in start.log_levels.items():
        logging.getLogger(name).setLevel(level)

    from pageloom_executors.group import DistributedGroup, GroupError, connect, open_store

    def load(group: DistributedGroup) -> Worker:
        link.doing = lambda: group.doing or "loads the model"
        worker = blueprint.build(group, str(device))
        link.send(Ready(worker.report()))
        if isinstance(message := link.receive(), Allocate):
            worker.allocate(message.num_blocks, message.host_blocks)
            link.send(Allocated())
        return worker

    def run(worker: Worker, group: DistributedGroup) -> None:
        link.doing = lambda: group.doing or "computes"
        while isinstance(message := link.receive(), Run):
            link.send(Done(worker.run_packed(message.step)))

    blueprint = Blueprint.load(start.blueprint)
    device = _prepare_device(blueprint, start.rank)
    try:
        rank = blueprint.rank(start.rank)
        is_master = store_fd is not None
        link.doing = lambda: "waits for other ranks"
        store = open_store("127.0.0.1", start.store_port, is_master=is_master, listening=store_fd)
        group = connect(rank, store, device, blueprint.timeout_seconds)
        try:
            worker = load(group)
        except ValueError as error:
            link.send(Refused(str(error)))
        else:
            run(worker, group)
            group.close()
    except GroupError as error:
        link.doing = lambda: "has given up waiting for others"
        link.send(Failed(str(error), by_others=True))


def _prepare_device(blueprint: Blueprint, index: int) -> torch.device:
    import torch

    if blueprint.num_threads:
        torch.set_num_threads(blueprint.num_threads)
    device = torch.device(blueprint.device)
    if device.type == "cuda":
        device = torch.device("cuda", (device.index or 0) + index)
        torch.cuda.set_device(device)
    return device


def _leave() -> NoReturn:
    """End without taking torch apart module by module, which takes a second or more."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
