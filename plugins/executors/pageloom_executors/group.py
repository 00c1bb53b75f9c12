"""How ranks talk to each other through `torch.distributed`, wherever their processes are."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pageloom.contract import Group, Rank

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}  # by type of device

_LOADING = timedelta(days=1)  # what one rank waits for another that still imports or loads


class GroupError(RuntimeError):
    """A rank could not talk to another: the cause is most likely there."""


class DistributedGroup(Group):
    """A rank among those that `connect` has made known to each other."""

    def __init__(self, rank: Rank, stage: Any) -> None:
        """``stage`` is the process group of the ranks of this stage, None if it is alone."""
        super().__init__(rank)
        self.doing = ""
        """What this rank waits for other ranks in, for another thread to tell."""
        self._stage = stage
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()

    def all_reduce(self, tensor: torch.Tensor) -> None:
        if self._stage is not None and tensor.numel():
            with self._waiting("all_reduce"):
                dist.all_reduce(tensor, group=self._stage)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._stage is None:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self.rank.tensor_size)]
        if tensor.numel():
            with self._waiting("all_gather"):
                dist.all_gather(parts, tensor, group=self._stage)
        return torch.cat(parts, dim=1)

    def send(self, tensor: torch.Tensor) -> None:
        """Does not wait for the next stage, unless it is as many tensors behind as there are
        stages: then more steps would be under way than there may be."""
        if self.rank.is_last:
            raise RuntimeError("there is no next stage")
        if not tensor.numel():
            return
        with self._waiting("send"):
            while len(self._sent) >= self.rank.stages:
                self._sent.popleft()[0].wait()
            copy = tensor.clone()
            self._sent.append((dist.isend(copy, self.rank.index + self.rank.tensor_size), copy))

    def receive(self, tensor: torch.Tensor) -> None:
        if self.rank.is_first:
            raise RuntimeError("there is no previous stage")
        if tensor.numel():
            with self._waiting("receive"):
                dist.recv(tensor, self.rank.index - self.rank.tensor_size)

    def close(self) -> None:
        """Take leave of the other ranks. Nothing else may be called afterwards."""
        self._sent.clear()
        dist.destroy_process_group()

    @contextmanager
    def _waiting(self, call: str) -> Iterator[None]:
        self.doing = f"waits for other ranks in {call}"
        try:
            with _reaching(call):
                yield
        finally:
            self.doing = ""


@contextmanager
def _reaching(what: str) -> Iterator[None]:
    """What goes wrong is most likely not this rank's fault."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise GroupError(f"{what}: {' '.join(str(error).split())}") from error


def open_store(
    host: str,
    port: int,
    *,
    is_master: bool,
    listening: int | None = None,
    timeout_seconds: float | None = None,
) -> Any:
    """Where ranks meet: one of them has it, on a ``listening`` socket if it was given one (a file
    descriptor), and the others find it there. Port 0 takes any that is free. ``timeout_seconds``
    is for a store that is open already, None for one whose rank still starts. Raises `GroupError`
    if it cannot be reached."""
    patience = _LOADING if timeout_seconds is None else timedelta(seconds=timeout_seconds)
    with _reaching(f"the store at {host}:{port}"):
        return dist.TCPStore(  # type: ignore[attr-defined]
            host,
            port,
            is_master=is_master,
            master_listen_fd=listening,
            wait_for_workers=False,
            timeout=patience,
        )


def connect(
    rank: Rank, store: Any, device: torch.device, timeout_seconds: float
) -> DistributedGroup:
    """Meet all other ranks at ``store``, a `torch.distributed.Store` that is new and theirs alone.
    Returns when all are there.

    Called once in a process, by every rank, before its model is loaded. On a GPU, ``device`` has
    an index and is the current one. Raises `GroupError` if they do not reach each other.
    """
    with _reaching("other ranks"):
        return _connect(rank, store, device, timeout_seconds)


def _connect(
    rank: Rank, store: Any, device: torch.device, timeout_seconds: float
) -> DistributedGroup:
    size = rank.tensor_size * rank.stages
    store.set(f"here/{rank.index}", "")
    store.wait([f"here/{index}" for index in range(size)], _LOADING)
    dist.init_process_group(
        BACKENDS[device.type],
        store=store,
        rank=rank.index,
        world_size=size,
        timeout=timedelta(seconds=timeout_seconds),
    )
    if rank.tensor_size == 1:
        return DistributedGroup(rank, None)
    groups = [
        dist.new_group(range(first, first + rank.tensor_size))
        for first in range(0, size, rank.tensor_size)
    ]
    return DistributedGroup(rank, groups[rank.stage])
