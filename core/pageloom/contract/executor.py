"""Executors.

The engine's process plans: it owns requests, blocks and queues, all of which are integers. An
executor takes each planned step to the model, wherever that runs, and returns what was drawn. The
model is computed by *workers*, one per rank, which the executor makes in whatever processes and on
whatever machines it likes, from a `Blueprint`. All workers get every step. They know nothing of
requests, so an executor only moves bytes.

A whole plugin, two files. ``pyproject.toml``::

    [project]
    name = "pageloom-apart"
    version = "0.1"
    dependencies = ["pageloom"]

    [project.entry-points.pageloom]
    apart = "pageloom_apart"

``pageloom_apart.py``::

    from multiprocessing import get_context
    from pageloom.contract import Alone, Blueprint, Executor, WorkerError, hookimpl

    contract_version = "1.2"

    @hookimpl
    def register_executors(register):
        register("apart", "pageloom_apart:Apart")

    def serve(pipe, blueprint):
        try:
            worker = Blueprint.load(blueprint).build(Alone())
            pipe.send(worker.report())
            worker.allocate(*pipe.recv())
            pipe.send(None)
        except ValueError as error:
            return pipe.send(error)
        try:
            while True:
                pipe.send(worker.run_packed(pipe.recv()))
        except Exception as error:
            pipe.send(WorkerError(f"rank 0 failed: {' '.join(str(error).split())}"))

    class Apart(Executor):
        # The model in a process of its own.
        process = None

        @classmethod
        def check(cls, blueprint):
            if blueprint.world_size > 1:
                return "runs one rank only"

        def start(self, blueprint):
            self.blueprint = blueprint
            context = get_context("spawn")
            self.pipe, far_end = context.Pipe()
            self.process = context.Process(
                target=serve, args=(far_end, blueprint.dump()), daemon=True
            )
            self.process.start()
            far_end.close()  # so that the end of the process is the end of the pipe
            return [self.receive_answer()]

        def lost(self, how):
            self.close()  # whatever it still does, it can be of no use
            return WorkerError(f"rank 0 (process {self.process.pid}) {how}")

        def send(self, message):
            try:
                self.pipe.send(message)
            except OSError as error:
                raise self.lost("has died") from error

        def receive_answer(self):
            try:
                answer = self.pipe.recv()
            except (EOFError, OSError) as error:
                raise self.lost("has died") from error
            if isinstance(answer, Exception):
                self.close()
                raise answer
            return answer

        def allocate(self, num_blocks, host_blocks):
            self.send((num_blocks, host_blocks))
            self.receive_answer()

        def submit(self, step):
            self.send(self.blueprint.pack(step))

        def receive(self):
            if not self.pipe.poll(self.blueprint.timeout_seconds):
                raise self.lost("hangs")
            return self.blueprint.unpack(self.receive_answer())

        def check_workers(self):
            if not self.process.is_alive():
                raise self.lost("has died")

        def close(self):
            if self.process is not None:
                self.process.kill()
                self.process.join()

Then ``parallel: {executor: apart}`` in the YAML.
"""

from __future__ import annotations

import importlib
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from pageloom.contract.component import Component
from pageloom.contract.ranks import Group, Rank

BlockPairs = Sequence[tuple[int, int]]  # (source, target)


class WorkerError(RuntimeError):
    """A worker died, hangs or failed. Says which rank, where, and how it is known. No step can be
    run any more: the engine ends all requests and closes the executor."""


class Step(Protocol):
    """One planned step, as far as executors may know it. Valid until its output is received."""

    @property
    def query_lens(self) -> Sequence[int]:
        """Tokens that each sequence of the step computes."""

    @property
    def seq_lens(self) -> Sequence[int]:
        """Tokens of each sequence once they are computed, those already in the cache included."""

    @property
    def num_draws(self) -> int:
        """How many next tokens are to be drawn."""

    @property
    def num_candidates(self) -> Sequence[int]:
        """For each beam of the step, how many of the likeliest next tokens are asked for."""

    @property
    def num_scored(self) -> Sequence[int]:
        """For each sequence with prompt log-probabilities, how many tokens are to be scored."""

    @property
    def swapped_out(self) -> BlockPairs:
        """From the KV cache to the host's blocks."""

    @property
    def swapped_in(self) -> BlockPairs:
        """From the host's blocks to the KV cache."""

    @property
    def copies(self) -> BlockPairs:
        """Within the KV cache."""


@dataclass(slots=True)
class StepOutput:
    """What came of a step, each list in the step's own order."""

    token_ids: list[int] = field(default_factory=list)  # one per draw
    logprobs: list[Any] = field(default_factory=list)  # one per draw, None where none is wanted
    failures: dict[int, str] = field(default_factory=dict)  # by draw: why it has no token
    candidates: list[list[tuple[int, float]] | None] = field(default_factory=list)
    """One per beam: (token id, log-probability), likeliest first; None where there are none."""
    scores: list[list[Any]] = field(default_factory=list)  # one per sequence with scored tokens


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What a worker knows once its part of the model is loaded."""

    architecture: str
    device: str
    dtype: str
    vocab_size: int
    max_model_len: int  # tokens
    backend: str
    block_size: int  # tokens
    bytes_per_block: int  # of the layers and heads of this rank
    num_blocks: int  # that there is room for
    host_blocks: int  # likewise, for those swapped out
    weights: Mapping[str, int]  # bytes by format
    activations: int | None  # bytes that a step takes beside, where they had to be left room for

    def in_blocks_of(self, size: int) -> WorkerReport:
        """With the same memory in blocks of ``size`` tokens."""
        of = self.block_size
        return replace(
            self,
            block_size=size,
            bytes_per_block=self.bytes_per_block and max(1, self.bytes_per_block * size // of),
            num_blocks=self.num_blocks * of // size,
            host_blocks=self.host_blocks * of // size,
        )


class Worker(ABC):
    """One rank's part of the model, with its KV cache. Not thread-safe."""

    @abstractmethod
    def report(self) -> WorkerReport: ...

    @abstractmethod
    def allocate(self, num_blocks: int, host_blocks: int) -> None:
        """Make the KV cache. Called once, before the first step, with the same numbers on every
        rank: the least that any has room for."""

    @abstractmethod
    def run(self, step: Step) -> StepOutput | None:
        """Compute a step together with the other ranks; the output if this rank `Rank.answers`."""

    @abstractmethod
    def run_packed(self, message: bytes) -> bytes:
        """`run` for a step that was packed: the packed output, empty if this rank has none."""


class Blueprint(ABC):
    """How to make the workers, and the form in which steps and outputs travel. No pickle.

    The engine makes it; executors only use it.
    """

    tensor_parallel_size: int
    pipeline_parallel_size: int
    device: str  # of rank 0, such as "cpu" or "cuda:0"; "cuda" leaves the card to the executor
    num_threads: int | None  # CPU threads of each worker
    timeout_seconds: float
    """After which a rank that does not answer counts as hung."""

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def rank(self, index: int) -> Rank:
        return Rank.of(index, self.tensor_parallel_size, self.pipeline_parallel_size)

    @abstractmethod
    def build(self, group: Group, device: str | None = None) -> Worker:
        """Load this rank's part of the model, on `device` or the given one.

        Raises `ValueError` with one sentence for the user when it cannot be loaded.
        """

    @abstractmethod
    def pack(self, step: Step) -> bytes: ...

    @abstractmethod
    def unpack(self, output: bytes) -> StepOutput: ...

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Keyword arguments, as JSON has them, from which the same class makes it again."""

    def dump(self) -> str:
        """As text, for another process that has the same packages."""
        cls = type(self)
        return json.dumps({"class": f"{cls.__module__}:{cls.__name__}", "state": self.state()})

    @staticmethod
    def load(text: str) -> Blueprint:
        """What `dump` wrote. For text of one's own engine only: it names code to import."""
        made = json.loads(text)
        module, _, name = made["class"].partition(":")
        blueprint: Blueprint = getattr(importlib.import_module(module), name)(**made["state"])
        return blueprint


class Executor(Component, ABC):
    """Runs steps on workers. Made once per engine, and used by one thread."""

    max_in_flight: int = 1
    """Steps that may be submitted before the first of them is received. With more than 1, the
    engine plans further requests while others are computed. Read after `start`."""

    finds_devices: bool = False
    """Whether it chooses the devices of its ranks itself, perhaps on other machines, so that those
    of the engine's machine are not what counts. Read from the class."""

    worker: Worker | None = None
    """The only worker, if it is an object in the engine's process."""

    @classmethod
    def check(cls, blueprint: Blueprint) -> str | None:
        """Why it cannot run these ranks here, in a sentence that goes on after its name; None if
        it can."""
        return None

    @abstractmethod
    def start(self, blueprint: Blueprint) -> Sequence[WorkerReport]:
        """Make all workers, and return their reports by rank.

        Raises `ValueError` when a worker's `Blueprint.build` does, `WorkerError` for all else.
        Whoever calls `start` calls `close` whatever comes of it.
        """

    @abstractmethod
    def allocate(self, num_blocks: int, host_blocks: int) -> None:
        """`Worker.allocate` on every rank. Raises as `start` does."""

    @abstractmethod
    def submit(self, step: Step) -> None:
        """Have all ranks compute a step, after those submitted before. May wait for the result.
        Raises `WorkerError`."""

    @abstractmethod
    def receive(self) -> StepOutput:
        """The output of the oldest step that is not received yet. Raises `WorkerError`, at the
        latest when a rank has been silent for the blueprint's ``timeout_seconds``."""

    def check_workers(self) -> None:
        """Raise `WorkerError` if it is known that a worker is gone. Called about once a second
        while no step is under way; must return at once."""

    def clock(self) -> float:
        """Seconds, by which the engine tells the times of requests. Never goes back."""
        return time.monotonic()

    def close(self) -> None:
        """End all workers and leave nothing behind: no process, socket or file. May be called at
        any time after `start` began, and more than once."""
