"""A model for tests of executors: it adds numbers up, over all ranks and stages, and fails on
request. It is made in an instant and has one right output for every step."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from pageloom.contract import Blueprint, Group, Step, StepOutput, Worker, WorkerReport
from pageloom.contract.executor import BlockPairs

WIDTH = 8  # columns of what goes from stage to stage
NUM_BLOCKS, HOST_BLOCKS = 7, 3

TROUBLES = {
    "dies": "its process kills itself",
    "stops": "its process is stopped, as by a debugger",
    "sleeps": "its main thread does not go on",
    "raises": "it raises RuntimeError",
    "refuses": "it raises ValueError",
}
SENTENCE = "this is no model for me"


@dataclass(frozen=True)
class Trouble:
    """What goes wrong at one rank: a key of `TROUBLES`."""

    kind: str
    rank: int

    def happen(self, rank: int) -> None:
        if rank != self.rank:
            return
        if self.kind in ("dies", "stops"):
            os.kill(os.getpid(), signal.SIGKILL if self.kind == "dies" else signal.SIGSTOP)
        elif self.kind == "sleeps":
            time.sleep(1000)
        elif self.kind == "refuses":
            raise ValueError(SENTENCE)
        raise RuntimeError("something is wrong\nhere")


@dataclass(frozen=True)
class SumStep:
    """Sequences that start at the numbers in ``starts``. The padding only makes it long."""

    starts: Sequence[int]
    padding: str = ""
    trouble: Trouble | None = None

    @property
    def query_lens(self) -> Sequence[int]:
        return [1] * len(self.starts)

    @property
    def seq_lens(self) -> Sequence[int]:
        return [1] * len(self.starts)

    @property
    def num_draws(self) -> int:
        return len(self.starts)

    num_candidates: Sequence[int] = ()
    num_scored: Sequence[int] = ()
    swapped_out: BlockPairs = ()
    swapped_in: BlockPairs = ()
    copies: BlockPairs = ()

    def expected(self, number: int, tensor_size: int, stages: int) -> list[int]:
        """The output of the ``number``-th step of a worker, from 1 on."""
        added = sum(
            tensor_size * (tensor_size + 1) // 2 * (stage + 1) + tensor_size * NUM_BLOCKS + number
            for stage in range(stages)
        )
        return [start + added + column for start in self.starts for column in range(tensor_size)]


class SumWorker(Worker):
    """Each stage adds something that depends on its ranks, its cache, and the steps before."""

    def __init__(self, group: Group, device: str) -> None:
        self._group = group
        self._device = torch.device(device)
        self._steps = 0
        self._num_blocks = 0

    def report(self) -> WorkerReport:
        """The process has its id in place of a number of bytes."""
        return WorkerReport(
            architecture=str(self._group.rank),
            device=str(self._device),
            dtype="float32",
            vocab_size=1000,
            max_model_len=64,
            backend="none",
            block_size=16,
            bytes_per_block=1,
            num_blocks=NUM_BLOCKS + self._group.rank.index,
            host_blocks=HOST_BLOCKS,
            weights={"pid": os.getpid()},
            activations=None,
        )

    def allocate(self, num_blocks: int, host_blocks: int) -> None:
        if host_blocks != HOST_BLOCKS:
            raise ValueError(f"host_blocks is {host_blocks}, not {HOST_BLOCKS}")
        self._num_blocks = num_blocks

    def run(self, step: Step) -> StepOutput | None:
        assert isinstance(step, SumStep)
        rank = self._group.rank
        if step.trouble:
            step.trouble.happen(rank.index)
        self._steps += 1
        hidden = torch.zeros(len(step.starts), WIDTH, device=self._device)
        if rank.is_first:
            hidden += torch.tensor(step.starts, device=self._device).view(-1, 1)
        else:
            self._group.receive(hidden)
        part = torch.full_like(hidden, (rank.tensor_rank + 1) * (rank.stage + 1))
        part += self._num_blocks
        self._group.all_reduce(part)
        hidden += part + self._steps
        if not rank.is_last:
            self._group.send(hidden)
            hidden.fill_(-1)  # what was sent is a copy
            return None
        columns = self._group.all_gather(hidden[:, :1] + rank.tensor_rank)
        return StepOutput([int(each) for each in columns.flatten()]) if rank.answers else None

    def run_packed(self, message: bytes) -> bytes:
        output = self.run(_unpacked(message))
        return b"" if output is None else json.dumps(output.token_ids).encode()


class SumBlueprint(Blueprint):
    """``trouble`` happens while the worker is built."""

    def __init__(
        self,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        timeout_seconds: float = 120.0,
        device: str = "cpu",
        trouble: Mapping[str, Any] | None = None,
    ) -> None:
        self.tensor_parallel_size = tensor_parallel_size
        self.pipeline_parallel_size = pipeline_parallel_size
        self.timeout_seconds = timeout_seconds
        self.device = device
        self.num_threads = 1
        self._trouble = trouble

    def build(self, group: Group, device: str | None = None) -> Worker:
        if self._trouble:
            Trouble(**self._trouble).happen(group.rank.index)
        return SumWorker(group, device or self.device)

    def pack(self, step: Step) -> bytes:
        assert isinstance(step, SumStep)
        trouble = asdict(step.trouble) if step.trouble else None
        return json.dumps([list(step.starts), step.padding, trouble]).encode()

    def unpack(self, output: bytes) -> StepOutput:
        return StepOutput(json.loads(output))

    def state(self) -> dict[str, Any]:
        return {
            "tensor_parallel_size": self.tensor_parallel_size,
            "pipeline_parallel_size": self.pipeline_parallel_size,
            "timeout_seconds": self.timeout_seconds,
            "device": self.device,
            "trouble": self._trouble,
        }


def _unpacked(message: bytes) -> SumStep:
    starts, padding, trouble = json.loads(message)
    return SumStep(starts, padding, Trouble(**trouble) if trouble else None)
