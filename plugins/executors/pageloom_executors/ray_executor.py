"""One Ray actor per rank, on any number of machines."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from importlib.util import find_spec
from typing import Any, NoReturn, TypeVar

from pageloom.contract import (
    Blueprint,
    Executor,
    Rank,
    Step,
    StepOutput,
    WorkerError,
    WorkerReport,
)
from pageloom_executors.ray_cluster import (
    by_machine,
    connect,
    disconnect,
    first_line,
    wait_for_room,
    why_dead,
)
from pageloom_executors.ray_rank import RankActor, decode
from pageloom_executors.wire import LOAD_SECONDS, Allocated, Done, Failed, Ready, Refused

R = TypeVar("R")
log = logging.getLogger(__name__)

POLL = 1.0  # seconds between two looks at all ranks while one is waited for
CAUSE = 3.0  # seconds from a rank's failure by another to that other's own
INLINE = 100_000  # bytes that Ray sends with a call; what is longer it would store for each call


class Strategy(Enum):
    """Of Ray's placement groups."""

    PACK = "PACK"
    SPREAD = "SPREAD"
    STRICT_PACK = "STRICT_PACK"
    STRICT_SPREAD = "STRICT_SPREAD"


@dataclass(frozen=True)
class Placed:
    """A rank, its actor, and where that is."""

    rank: Rank
    actor: Any
    address: str
    pid: int

    def __str__(self) -> str:
        return f"{self.rank} at {self.address} (pid {self.pid})"


class RayExecutor(Executor):
    """Ranks wherever a Ray cluster has room for them. Those of a stage are on one machine, if they
    fit there."""

    finds_devices = True

    @dataclass
    class Config:
        address: str = "auto"
        """Of the cluster, as HOST:PORT; ``auto`` is the one of this machine or of RAY_ADDRESS,
        ``local`` starts one that ends with the engine."""
        strategy: Strategy = Strategy.PACK
        """Where ranks go: ``PACK`` on few machines, ``SPREAD`` over many; ``STRICT_PACK`` on one,
        ``STRICT_SPREAD`` on one each."""
        num_cpus: float = 1.0
        """Cores that a rank takes of the cluster's."""
        num_gpus: float = 1.0
        """Cards that a rank takes of the cluster's, where the model runs on any."""
        placement_seconds: float = 600.0
        """How long to wait until the cluster has room."""
        load_seconds: float = LOAD_SECONDS
        """How long no rank may get ready while the model is loaded, before they count as hung."""

        def __post_init__(self) -> None:
            if "://" in self.address:
                raise ValueError(
                    f"address must be auto, local or HOST:PORT of the cluster, not {self.address}"
                )
            for name in ("num_cpus", "placement_seconds", "load_seconds"):
                if not getattr(self, name) > 0:
                    raise ValueError(f"{name} must be above 0, not {getattr(self, name):g}")
            if not 0 < self.num_gpus <= 1:
                raise ValueError(f"num_gpus must be above 0 and at most 1, not {self.num_gpus:g}")

    config: Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._ranks: list[Placed] = []
        self._lives: dict[Any, Placed] = {}  # by what never comes unless the actor dies
        self._steps: deque[list[Any]] = deque()  # replies to come, by rank
        self._due: dict[Any, Placed] = {}  # replies that are waited for, or should have come
        self._lost: str | None = None  # why no step can be run any more
        self._group: Any = None
        self._connected = False

    @classmethod
    def check(cls, blueprint: Blueprint) -> str | None:
        if find_spec("ray") is None:
            return "needs the package ray: pip install 'pageloom[ray]'"
        return None

    # -- start ------------------------------------------------------------------------------

    def start(self, blueprint: Blueprint) -> Sequence[WorkerReport]:
        self._blueprint = blueprint
        self._timeout = blueprint.timeout_seconds
        self.max_in_flight = blueprint.pipeline_parallel_size
        self._answering = next(
            index for index in range(blueprint.world_size) if blueprint.rank(index).answers
        )
        self._connected = connect(self.config.address)
        self._make_actors(self._place())
        first = self._ranks[0]
        (port,) = self._started({first.actor.open_store.remote(): first})
        threads = blueprint.num_threads or max(1, int(self.config.num_cpus))
        replies = self._all(Ready, "load", first.address, port, threads)
        return [reply.report for reply in replies]

    def allocate(self, num_blocks: int, host_blocks: int) -> None:
        self._all(Allocated, "allocate", num_blocks, host_blocks)

    def _place(self) -> list[int]:
        """The bundles of the placement group by rank: those of a machine follow each other."""
        from ray.util import placement_group

        bundles = [self._resources()] * self._blueprint.world_size
        self._group = placement_group(bundles, strategy=self.config.strategy.value)
        wait_for_room(self._group, bundles, self.config.placement_seconds)
        return by_machine(self._group, len(bundles))

    def _resources(self) -> dict[str, float]:
        on_card = self._blueprint.device.startswith("cuda")
        return {"CPU": self.config.num_cpus} | ({"GPU": self.config.num_gpus} if on_card else {})

    def _make_actors(self, bundles: Sequence[int]) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        resources = self._resources()
        remote: Any = ray.remote  # whose types know nothing of concurrency groups
        kind = remote(
            num_cpus=resources["CPU"],
            num_gpus=resources.get("GPU", 0),
            max_restarts=0,
            concurrency_groups={"watch": 2},
        )(RankActor)
        text, level = self._blueprint.dump(), logging.getLogger("pageloom").getEffectiveLevel()
        actors = [
            kind.options(
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, bundle)
            ).remote(text, index, level)
            for index, bundle in enumerate(bundles)
        ]
        # Before anything is waited for, so that `close` ends them.
        self._ranks = [
            Placed(self._blueprint.rank(index), actor, "a machine of the cluster", 0)
            for index, actor in enumerate(actors)
        ]
        found = self._started({placed.actor.where.remote(): placed for placed in self._ranks})
        self._ranks = [
            Placed(placed.rank, placed.actor, *where)
            for placed, where in zip(self._ranks, found, strict=True)
        ]
        self._lives = {
            placed.actor.live.options(concurrency_group="watch").remote(): placed
            for placed in self._ranks
        }

    def _all(self, kind: type[R], method: str, *arguments: Any) -> list[R]:
        """What all ranks reply, unless one is gone or fails, or none gets ready for too long."""
        refs = {getattr(placed.actor, method).remote(*arguments): placed for placed in self._ranks}
        replies: dict[Any, R] = {}
        self._due = dict(refs)
        while self._due:
            for ref in self._wait_for_some():
                replies[ref] = self._reply(ref, self._lives.get(ref) or refs[ref], kind)
                del self._due[ref]
        return [replies[ref] for ref in refs]

    def _started(self, refs: dict[Any, Placed]) -> list[Any]:
        """What actors return that may still start."""
        found = {}
        self._due = dict(refs)
        while self._due:
            for ref in self._wait_for_some():
                found[ref] = self._get(ref, self._lives.get(ref) or refs[ref])
                del self._due[ref]
        return [found[ref] for ref in refs]

    def _wait_for_some(self) -> list[Any]:
        """What is due and has come, or the lives of actors that are gone."""
        import ray

        limit = self.config.load_seconds
        deadline = time.monotonic() + limit
        while not (ready := ray.wait([*self._lives, *self._due], timeout=POLL)[0]):
            if time.monotonic() >= deadline:
                self._raise_silent(
                    f"no rank has become ready for {limit:g} seconds "
                    "(parallel.options.load_seconds)"
                )
        return list(ready)

    # -- steps ------------------------------------------------------------------------------

    def submit(self, step: Step) -> None:
        import ray

        self._check_usable()
        message: Any = self._blueprint.pack(step)
        try:
            if len(message) > INLINE:
                message = ray.put(message)
            self._steps.append([placed.actor.run.remote(message) for placed in self._ranks])
        except BaseException:  # such as KeyboardInterrupt: some may have it and others not
            self._lost = "not all ranks were sent the same"
            raise

    def receive(self) -> StepOutput:
        import ray

        self._check_usable()
        refs = self._steps[0]
        answer = refs[self._answering]
        self._due |= dict(zip(refs, self._ranks, strict=True))
        deadline = time.monotonic() + self._timeout
        while True:
            left = deadline - time.monotonic()
            ready, _ = ray.wait([answer, *self._lives], timeout=max(0.0, min(POLL, left)))
            if answer in ready:
                break
            self.check_workers()
            self._check_due()
            if left <= 0:
                self._raise_silent(
                    f"no answer within {self._timeout:g} seconds (parallel.timeout_seconds)"
                )
        output = self._reply(answer, self._due[answer], Done).output
        self._steps.popleft()  # now only: who is interrupted before asks again
        del self._due[answer]
        self._check_due()
        return self._blueprint.unpack(output)

    def check_workers(self) -> None:
        import ray

        self._check_usable()
        ready, _ = ray.wait(list(self._lives), timeout=0)
        for ref in ready:
            self._get(ref, self._lives[ref])

    def _check_usable(self) -> None:
        if self._lost is not None:
            raise WorkerError(self._lost)
        if not self._lives:
            raise WorkerError("the executor is closed")

    def _check_due(self) -> None:
        """See to it that the ranks that give no output did not fail."""
        import ray

        if self._due:
            done, _ = ray.wait(list(self._due), num_returns=len(self._due), timeout=0)
            for ref in done:
                self._reply(ref, self._due[ref], Done)
                del self._due[ref]

    def _reply(self, ref: Any, placed: Placed, kind: type[R]) -> R:
        """What a rank replied. Raises `ValueError` where it refuses, `WorkerError` for all else
        that went wrong."""
        reply = decode(self._get(ref, placed))
        if isinstance(reply, kind):
            return reply
        if isinstance(reply, Refused):
            raise ValueError(reply.reason)
        if not isinstance(reply, Failed):
            raise self._lose(f"{placed} replied {reply!r}")
        if reply.by_others:
            self._raise_cause(ref, f"{placed} failed: {reply.reason}")
        raise self._lose(f"{placed} failed: {reply.reason}")

    def _raise_cause(self, told: Any, symptom: str) -> None:
        """Raise what has kept a rank from reaching another, if that shows."""
        import ray

        others = {ref: placed for ref, placed in self._due.items() if ref != told}
        deadline = time.monotonic() + CAUSE
        while (left := deadline - time.monotonic()) > 0:
            ready, _ = ray.wait([*self._lives, *others], timeout=left)
            for ref in ready:
                placed = self._lives.get(ref) or others.pop(ref)
                reply = decode(self._get(ref, placed))
                if isinstance(reply, Failed) and not reply.by_others:
                    raise self._lose(f"{placed} failed: {reply.reason}")
        if others:
            self._raise_silent(symptom)

    def _raise_silent(self, symptom: str) -> NoReturn:
        """Raise which ranks do not answer, and what they do instead."""
        import ray

        answered, _ = ray.wait(list(self._due), num_returns=len(self._due), timeout=0)
        silent = {self._due[ref] for ref in self._due if ref not in answered}
        asked = {
            placed.actor.doing.options(concurrency_group="watch").remote(): placed
            for placed in silent
        }
        told, _ = ray.wait(list(asked), num_returns=len(asked), timeout=POLL)
        said = [
            f"{placed} {self._get(ref, placed) if ref in told else 'hangs'}"
            for ref, placed in asked.items()
        ]
        raise self._lose(f"{symptom}: {'; '.join(said) or 'nobody knows why'}")

    def _get(self, ref: Any, placed: Placed) -> Any:
        import ray
        from ray.exceptions import RayActorError, RayError

        try:
            return ray.get(ref)
        except RayActorError as error:
            raise self._lose(f"{placed} has died: {why_dead(error)}") from error
        except RayError as error:
            raise self._lose(f"{placed}: {first_line(error)}") from error

    def _lose(self, reason: str) -> WorkerError:
        """What is to be raised now, and from now on."""
        self._lost = reason
        return WorkerError(reason)

    # -- end --------------------------------------------------------------------------------

    def close(self) -> None:
        if not self._connected and not self._ranks and self._group is None:
            return
        import ray
        from ray.util import remove_placement_group

        if ray.is_initialized():
            for placed in self._ranks:
                with suppress(Exception):  # whatever is wrong with the cluster, the rest must go
                    ray.kill(placed.actor)
            if self._group is not None:
                with suppress(Exception):
                    remove_placement_group(self._group)
            if self._connected:
                disconnect()
        self._ranks, self._group, self._connected = [], None, False
        self._lives.clear()
        self._steps.clear()
        self._due.clear()
