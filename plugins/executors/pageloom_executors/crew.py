"""The ranks on this machine together: what they are sent, what they say, and, if they say nothing,
what is wrong with them."""

from __future__ import annotations

import logging
import math
import select
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from pageloom.contract import WorkerError
from pageloom_executors.processes import RankProcess
from pageloom_executors.wire import (
    Allocated,
    Done,
    Failed,
    FromRank,
    Log,
    Ping,
    Pong,
    Ready,
    Refused,
    ToRank,
    pack,
)

SLICE = 0.25  # seconds of waiting at a time
DIAGNOSIS = 0.75  # seconds for ranks to say what they do, or to be found dead


class Crew:
    """Used by one thread. Once a rank is lost, every call but the first raises `WorkerError` with
    the same message."""

    def __init__(self, ranks: Sequence[RankProcess], timeout_seconds: float) -> None:
        self.ranks = ranks
        self.outputs: deque[bytes] = deque()
        """Of the steps that are done, in their order."""
        self._timeout = timeout_seconds
        self._failure: str | None = None
        self._speakers: dict[tuple[str, int, str], RankProcess] = {}  # by what they said first
        self._by_fd = {each.connection.fileno(): each for each in ranks}
        self._poller = select.poll()
        for fd in self._by_fd:
            self._poller.register(fd, select.POLLIN)

    @property
    def is_sound(self) -> bool:
        return self._failure is None

    def check(self) -> None:
        """Raise `WorkerError` if a rank is known to be lost."""
        self._repeat_failure()
        self._listen(0)

    def send(self, message: ToRank) -> None:
        """To every rank, which is to answer. Waits while one does not take it, for which the other
        thread of a rank must be stopped."""
        self._repeat_failure()
        data = pack(message)
        try:
            for each in self.ranks:
                each.ask(data)
            self.wait(
                lambda: not any(each.has_unsent for each in self.ranks),
                f"a rank has read nothing for {self._timeout:g} seconds (parallel.timeout_seconds)",
            )
        except BaseException:  # such as KeyboardInterrupt: some may have it and others not
            self._failure = self._failure or "not all ranks were sent the same"
            raise

    def wait_for_step(self) -> bytes:
        """The output of the oldest step that is not taken yet."""
        self._repeat_failure()
        self.wait(
            lambda: bool(self.outputs),
            f"no step has ended for {self._timeout:g} seconds (parallel.timeout_seconds)",
        )
        return self.outputs.popleft()

    def wait(
        self, done: Callable[[], bool], symptom: str, limit_seconds: float | None = None
    ) -> None:
        """Listen until it is ``done``, or until ranks are silent for the limit, by default the
        timeout: that is the ``symptom``. Raises `WorkerError` and, for a model that cannot be
        loaded, `ValueError`."""
        limit = self._timeout if limit_seconds is None else limit_seconds
        silent = 0.0
        while not done():
            before = time.monotonic()
            if self._listen(min(SLICE, limit)):
                silent = 0.0
                continue
            # Not the time for which this process was stopped, such as by Ctrl-Z.
            silent += min(time.monotonic() - before, 2 * SLICE)
            if silent >= limit:
                self._diagnose(symptom)

    def _repeat_failure(self) -> None:
        if self._failure is not None:
            raise WorkerError(self._failure)

    def _listen(self, seconds: float) -> bool:
        """`_hear`, and raise what is known then."""
        heard = self._hear(seconds)
        self._judge()
        for each in self.ranks:
            if each.failure is not None:
                self._diagnose(f"rank {each.rank.index} failed in {each.failure.reason}")
        return heard

    def _hear(self, seconds: float) -> bool:
        """Wait for something to come; whether it was progress."""
        for each in self.ranks:
            if not each.gone:
                wanted = select.POLLIN | (select.POLLOUT if each.has_unsent else 0)
                self._poller.modify(each.connection, wanted)
        progress = False
        for fd, events in self._poller.poll(math.ceil(seconds * 1000)):
            each = self._by_fd[fd]
            if events & select.POLLOUT:
                each.flush()
                progress = True
            if events & ~select.POLLOUT:
                progress |= self._read(each)
        return progress

    def _read(self, each: RankProcess) -> bool:
        progress = False
        try:
            for message in each.read():
                progress |= self._take(each, message)
        except (ValueError, msgspec.MsgspecError) as error:
            each.failure = Failed(f"it sent what cannot be read: {error}", by_others=False)
        except BaseException:  # such as KeyboardInterrupt: it may have said more, which is lost
            self._failure = f"{each} was interrupted while it was listened to"
            raise
        if each.gone:
            self._poller.unregister(each.connection)
        return progress

    def _take(self, each: RankProcess, message: FromRank) -> bool:
        """Whether it is progress."""
        match message:
            case Ready():
                each.owed -= 1
                each.report = message.report
            case Allocated():
                each.owed -= 1
                each.allocated = True
            case Done():
                each.owed -= 1
                if each.rank.answers:
                    self.outputs.append(message.output)
            case Pong():
                each.doing = message.doing
                return False
            case Log():
                self._log(each, message)
                return False
            case Refused():
                each.refusal = message.reason
            case Failed():
                each.failure = message
        return True

    def _log(self, each: RankProcess, said: Log) -> None:
        """Of what several ranks say alike of the model that they load, one speaks for all."""
        if not each.allocated and said.level < logging.ERROR:
            key = (said.logger, said.level, said.message)
            if self._speakers.setdefault(key, each) is not each:
                return
        logger = logging.getLogger(said.logger)
        logger.log(said.level, "rank %d: %s", each.rank.index, said.message)

    def _judge(self) -> None:
        """Raise if a rank is lost through itself."""
        for each in self.ranks:
            if each.refusal is not None:
                self._failure = each.refusal
                raise ValueError(each.refusal)
        for each in self.ranks:
            if each.failure is not None and not each.failure.by_others:
                self._fail(f"{each}: {each.failure.reason}")
        if lost := [f"{each} {each.how_it_ended()}" for each in self.ranks if each.gone]:
            self._fail("; ".join(lost))

    def _diagnose(self, symptom: str) -> None:
        """Something is wrong, and no rank has said that it is the cause. Raises in any case."""
        ping = pack(Ping())
        for each in self.ranks:
            each.doing = None
            each.send(ping)
        deadline = time.monotonic() + DIAGNOSIS
        while (left := deadline - time.monotonic()) > 0 and any(
            each.doing is None for each in self.ranks
        ):
            self._hear(left)
            self._judge()
        hung = [each for each in self.ranks if each.doing is None]
        suspects = hung or [each for each in self.ranks if each.owed]
        told = "; ".join(f"{each} {each.doing or 'does not react'}" for each in suspects)
        self._fail(f"{symptom}: {told}" if told else symptom)

    def _fail(self, message: str) -> None:
        self._failure = message
        raise WorkerError(message)
