"""Several engines behind one server, which take them for one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from pageloom.contract import EngineInfo
from pageloom.engine.outputs import CompletionChunk
from pageloom.scheduling import SamplingParams
from pageloom.serve.client import EngineClient, EngineDiedError
from pageloom.serve.replicas_metrics import merge
from pageloom.serve.replicas_routing import PrefixHashes, Router
from pageloom.serve.replicas_scaling import Load, Scaling
from pageloom.serve.restart import start_again
from pageloom.serve.wire import Inspection

log = logging.getLogger(__name__)

LOOK = 1.0  # seconds between two looks at how many replicas there should be


@dataclass
class Replica:
    """One engine. The lowest number that is free is the next one's."""

    number: int
    client: EngineClient
    leaving: bool = False  # gets no request any more, and is stopped when it has none


class Replicas:
    """What an `EngineClient` is, of as many engines as the load wants.

    Each has the whole model, and runs wherever its executor puts it. A request goes to one of them,
    and once more to another if that one dies before the first chunk. `died` is set when none is
    left, and none comes back.
    """

    def __init__(
        self,
        make: Callable[[int], EngineClient],
        least: int,
        router: Router,
        *,
        scaling: Scaling | None = None,
        restart: bool = False,
    ) -> None:
        """``make`` gives the client of the engine with a number, which is not started yet.
        ``scaling`` says how many there should be, from ``least`` on; None leaves it at that. With
        ``restart``, one that dies is started again."""
        self._make = make
        self._least = least
        self._router = router
        self._scaling = scaling
        self._restart = restart
        self._replicas: dict[int, Replica] = {}  # that run, or are being started
        self._tasks: dict[int, asyncio.Task[None]] = {}  # the life of each, by number
        self._looking: asyncio.Task[None] | None = None
        self._known: EngineClient | None = None  # the last that was ready
        self.died = asyncio.Event()

    # -- what the server asks of its engine -------------------------------------------------

    @property
    def info(self) -> EngineInfo:
        return self._any.info

    @property
    def vocab_size(self) -> int:
        return self._any.vocab_size

    @property
    def _any(self) -> EngineClient:
        if self._known is None:
            raise EngineDiedError("no engine is ready")
        return self._known

    @property
    def is_alive(self) -> bool:
        return bool(self._alive())

    @property
    def num_open(self) -> int:
        """Requests that have not ended yet."""
        return sum(replica.client.num_open for replica in self._replicas.values())

    @property
    def num_waiting(self) -> int:
        """Requests that have had no chunk yet."""
        return sum(replica.client.num_waiting for replica in self._replicas.values())

    async def start(self) -> None:
        """Returns when the least number of engines is ready. Raises `EngineDiedError` if one of
        them cannot be; then, as when this is cancelled, no process is left. Called once."""
        starting = [asyncio.create_task(self._start(number)) for number in range(self._least)]
        try:
            await asyncio.gather(*starting)
        except BaseException:
            await _cancel(*starting)
            await self._stop_all()
            raise
        if self._scaling is not None:
            self._looking = asyncio.create_task(self._look(self._scaling))

    async def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        user: str = "",
        cache_salt: str = "",
    ) -> AsyncIterator[CompletionChunk]:
        """See `EngineClient.generate`. Raises `EngineDiedError` if an engine dies in the middle
        of the request, or a second one before its beginning: that may be the request's fault."""
        may_move = True
        while True:
            replica, hashes = self._choose(prompt, cache_salt)
            chunks = replica.client.generate(
                prompt, params, priority=priority, user=user, cache_salt=cache_salt
            )
            begun = False
            try:
                async with aclosing(chunks) as opened:  # type: ignore[type-var]
                    async for chunk in opened:
                        begun = True
                        if hashes is not None and params.n == 1:
                            hashes.extend(chunk.token_ids)
                        yield chunk
            except EngineDiedError:
                if begun or not may_move:
                    raise
                may_move = False
            else:
                if hashes is not None:
                    self._sent(replica, hashes)
                return

    async def inspect(self) -> Inspection:
        """Raises `EngineDiedError` if there is no engine."""
        alive = self._alive()
        found = await asyncio.gather(
            *(replica.client.inspect() for replica in alive.values()), return_exceptions=True
        )
        inspections = {
            number: each
            for number, each in zip(alive, found, strict=True)
            if isinstance(each, Inspection)
        }
        if not inspections:
            raise EngineDiedError("no engine is running")
        return merge(inspections)

    async def stop(self) -> None:
        """End all, and with them what is open. Safe to call twice."""
        if self._looking is not None:
            await _cancel(self._looking)
        await self._stop_all()

    def kill(self) -> None:
        """End all processes at once."""
        for replica in self._replicas.values():
            replica.client.kill()

    # -- where a request goes ---------------------------------------------------------------

    def _alive(self) -> dict[int, Replica]:
        return {n: each for n, each in self._replicas.items() if each.client.is_alive}

    def _choose(
        self, prompt: Sequence[int], cache_salt: str
    ) -> tuple[Replica, PrefixHashes | None]:
        alive = self._alive()
        if not alive:
            raise EngineDiedError("no engine is running")
        staying = {n: each for n, each in alive.items() if not each.leaving} or alive
        loads = {n: each.client.num_open for n, each in staying.items()}
        if not self._router.by_prefix:
            return staying[self._router.choose(loads)], None
        hashes = PrefixHashes(self.info.block_size, cache_salt)
        hashes.extend(prompt)
        chosen = staying[self._router.choose(loads, hashes.hashes)]
        self._sent(chosen, hashes)
        return chosen, hashes

    def _sent(self, replica: Replica, hashes: PrefixHashes) -> None:
        if replica.client.is_alive:
            room = replica.client.info.num_blocks
            self._router.sent(replica.number, hashes.hashes, room)

    # -- the life of a replica --------------------------------------------------------------

    async def _start(self, number: int) -> None:
        client = self._make(number)
        self._replicas[number] = replica = Replica(number, client)
        try:
            await client.start()
        except BaseException:
            self._remove(replica)
            raise
        self._known = client
        self._tasks[number] = asyncio.create_task(self._live(replica))

    async def _live(self, replica: Replica) -> None:
        """Watch it until it is gone for good."""
        while True:
            await replica.client.died.wait()
            self._router.forget(replica.number)
            log.warning("replica %d has died; %d go on", replica.number, len(self._alive()))
            comes_back = self._restart and not replica.leaving
            name = f"replica {replica.number}"
            if not (comes_back and await start_again(replica.client, name)):
                break
        self._remove(replica)

    def _remove(self, replica: Replica) -> None:
        if self._replicas.get(replica.number) is replica:
            del self._replicas[replica.number]
            self._tasks.pop(replica.number, None)
        if not self._replicas:
            self.died.set()

    async def _stop_all(self) -> None:
        await _cancel(*self._tasks.values())
        self._tasks.clear()
        await asyncio.gather(*(each.client.stop() for each in self._replicas.values()))

    # -- how many there are -----------------------------------------------------------------

    async def _look(self, scaling: Scaling) -> None:
        clock = asyncio.get_running_loop().time
        starting: set[asyncio.Task[None]] = set()
        try:
            while True:
                await asyncio.sleep(LOOK)
                if not self.is_alive:
                    continue
                count = sum(not each.leaving for each in self._replicas.values())
                load = Load(count, self.num_waiting, self.num_open)
                wanted = scaling.replicas(load, clock())
                if wanted > count:
                    starting.add(task := asyncio.create_task(self._add()))
                    task.add_done_callback(starting.discard)
                elif wanted < count:
                    self._let_go()
                await self._stop_idle()
        finally:
            await _cancel(*starting)

    async def _add(self) -> None:
        """One more: one that was about to leave, or a new one."""
        for replica in self._replicas.values():
            if replica.leaving:
                replica.leaving = False
                return
        number = next(n for n in range(len(self._replicas) + 1) if n not in self._replicas)
        log.info("replica %d is started, since requests wait", number)
        try:
            await self._start(number)
        except EngineDiedError as error:
            log.error("replica %d cannot be started: %s", number, error)

    def _let_go(self) -> None:
        """The one with the fewest requests, of equals the last."""
        staying = [each for each in self._replicas.values() if not each.leaving]
        leaver = min(staying, key=lambda each: (each.client.num_open, -each.number))
        leaver.leaving = True

    async def _stop_idle(self) -> None:
        idle = [r for r in self._replicas.values() if r.leaving and not r.client.num_open]
        for replica in idle:
            log.info("replica %d is stopped, since fewer are enough", replica.number)
            del self._replicas[replica.number]
            self._router.forget(replica.number)
        for replica in idle:
            if task := self._tasks.pop(replica.number, None):
                await _cancel(task)
            await replica.client.stop()


async def _cancel(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
