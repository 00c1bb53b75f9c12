"""Ranks as threads of one process, for tests of models that are divided."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Queue
from typing import TypeVar

import torch

from pageloom.contract import Group, Rank

PATIENCE = 300  # seconds that a rank waits for another
T = TypeVar("T")


class Threads(Group):
    """One of several ranks, which leave tensors in memory for each other."""

    def __init__(self, rank: Rank, meeting: Meeting, before: Queue, after: Queue) -> None:
        super().__init__(rank)
        self.meeting = meeting
        self.before, self.after = before, after
        self.calls: list[str] = []

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self.calls.append("all_reduce")
        tensor.copy_(sum(self.meeting.exchange(self.rank.tensor_rank, tensor)))

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        self.calls.append("all_gather")
        assert tensor.ndim == 2
        return torch.cat(self.meeting.exchange(self.rank.tensor_rank, tensor), 1)

    def send(self, tensor: torch.Tensor) -> None:
        assert not self.rank.is_last
        assert tensor.is_contiguous()
        self.calls.append("send")
        self.after.put(tensor.clone())

    def receive(self, tensor: torch.Tensor) -> None:
        assert not self.rank.is_first
        assert tensor.is_contiguous()
        self.calls.append("receive")
        sent = self.before.get(timeout=PATIENCE)
        assert (sent.shape, sent.dtype) == (tensor.shape, tensor.dtype)
        tensor.copy_(sent)


class Meeting:
    """Where the tensor ranks of a stage exchange tensors of the same shape and dtype."""

    def __init__(self, size: int) -> None:
        self.shelf: list[torch.Tensor | None] = [None] * size
        self.barrier = threading.Barrier(size, timeout=PATIENCE)

    def exchange(self, place: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        assert tensor.is_contiguous()
        self.shelf[place] = tensor.clone()
        self.barrier.wait()
        every = [each for each in self.shelf if each is not None]
        assert len({(each.shape, each.dtype) for each in every}) == 1
        self.barrier.wait()
        return every


def on_ranks(function: Callable[[Threads], T], tensor_size: int = 1, stages: int = 1) -> list[T]:
    """What ``function(group)`` returns on each rank, in the order of ranks, or what the first of
    them to fail raises."""
    meetings = [Meeting(tensor_size) for _ in range(stages)]
    pipes = [[Queue() for _ in range(tensor_size)] for _ in range(stages + 1)]
    results: list[T | None] = [None] * (tensor_size * stages)
    errors: list[BaseException] = []

    def work(index: int) -> None:
        rank = Rank.of(index, tensor_size, stages)
        pipe = (pipes[n][rank.tensor_rank] for n in (rank.stage, rank.stage + 1))
        try:
            results[index] = function(Threads(rank, meetings[rank.stage], *pipe))
        except BaseException as error:
            errors.append(error)
            for meeting in meetings:
                meeting.barrier.abort()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(results))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
