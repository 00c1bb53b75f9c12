"""The processes of ranks on this machine, as the engine's process sees them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress

from pageloom.contract import Rank, WorkerReport
from pageloom.contract.framing import Unpacker
from pageloom_executors.wire import MAX_MESSAGE, RECEIVE_BYTES, Failed, FromRank

LAST_BREATH = 1.0  # seconds for a process that has closed its connection to be gone


class RankProcess:
    """One rank: its process, and the connection to it. Nothing here waits, but for its end."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.report: WorkerReport | None = None
        self.allocated = False
        self.owed = 0
        """Messages that it was sent and has not answered yet."""
        self.doing: str | None = None
        """What it said when it was pinged, if it did."""
        self.refusal: str | None = None
        """Why its model cannot be loaded, for the user."""
        self.failure: Failed | None = None
        """Why it cannot go on, as it said itself."""
        self.gone = False
        """Whether the connection has ended."""
        self.process: subprocess.Popen[bytes] | None = None
        self.connection, self._far_end = socket.socketpair()
        self.connection.setblocking(False)
        self._unsent = bytearray()
        self._unpacker = Unpacker(FromRank, MAX_MESSAGE)

    def __str__(self) -> str:
        pid = f", pid {self.process.pid}" if self.process else ""
        return f"{str(self.rank).removesuffix(')')}{pid})"

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def launch(self, environment: Mapping[str, str], store: socket.socket | None) -> None:
        """Start the process, which ends with the thread that calls this. ``store`` is a listening
        socket for the rank to have the others meet at."""
        command = [sys.executable, "-P", "-m", "pageloom_executors.rank"]
        command += ["--parent", str(os.getpid()), "--socket", str(self._far_end.fileno())]
        passed = [self._far_end.fileno()]
        if store is not None:
            command += ["--store", str(store.fileno())]
            passed.append(store.fileno())
        self.process = subprocess.Popen(
            command, env=environment, pass_fds=passed, stdin=subprocess.DEVNULL, stdout=2
        )
        self._far_end.close()

    def ask(self, message: bytes) -> None:
        """`send` what is to be answered."""
        self.owed += 1
        self.send(message)

    def send(self, message: bytes) -> None:
        """Send what `wire.pack` made as far as the connection takes it, and keep the rest."""
        self._unsent += message
        self.flush()

    def flush(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self.connection.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:  # reading tells that it is gone, after what it said last
            self._unsent.clear()

    def read(self) -> Iterator[FromRank]:
        """What has arrived. Raises `ValueError` for what is no message."""
        try:
            data = self.connection.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self.gone = not data
        yield from self._unpacker.feed(data)

    def how_it_ended(self) -> str:
        """Of a rank that is gone: what became of its process."""
        assert self.process is not None
        try:
            code = self.process.wait(LAST_BREATH)
        except subprocess.TimeoutExpired:
            return "has closed its connection"
        if code >= 0:
            return f"ended with code {code}"
        with suppress(ValueError):  # signals without a name
            return f"was ended by {signal.Signals(-code).name}"
        return f"was ended by signal {-code}"

    def hang_up(self) -> None:
        """Close the connection, upon which the process ends if it can."""
        self.connection.close()
        self._far_end.close()

    def bury(self, patience: float) -> None:
        """See to it that the process is gone, and kill it if it does not end in that many
        seconds."""
        if self.process is None:
            return
        try:
            self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Launch:
    """Starts the processes of all ranks, in a thread that stays as long as they do: on Linux a
    process can be made to end with the thread that has started it, and other threads may well end
    before the engine does."""

    def __init__(
        self, ranks: Sequence[RankProcess], environment: Mapping[str, str], store: socket.socket
    ) -> None:
        """``store`` is a listening socket for the ranks to meet at, and closed here."""
        self._ranks, self._environment, self._store = list(ranks), environment, store
        self._launched: Future[None] = Future()
        threading.Thread(target=self._run, name="ranks", daemon=True).start()

    def wait(self) -> None:
        """Returns when no more processes are started. Raises `OSError` if one cannot be."""
        self._launched.result()

    def _run(self) -> None:
        try:
            self._launch()
        except BaseException as error:
            self._launched.set_exception(error)
        else:
            self._launched.set_result(None)
        processes = [each.process for each in self._ranks]
        self._ranks.clear()  # whoever drops an executor closes its connections
        for process in processes:
            if process is not None:
                process.wait()

    def _launch(self) -> None:
        with self._store:
            for each in self._ranks:
                each.launch(self._environment, None if each.rank.index else self._store)


def bury(ranks: Sequence[RankProcess], patience: float) -> None:
    """End all of these processes, and return when none is left."""
    for each in ranks:
        each.hang_up()
    deadline = time.monotonic() + patience
    for each in ranks:
        each.bury(max(0.0, deadline - time.monotonic()))
