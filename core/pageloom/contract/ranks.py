"""The ranks that a model is divided over, and how their workers talk to each other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Rank:
    """One of the workers that a model is divided over: first into stages of consecutive layers
    (pipeline parallelism), then each layer within a stage (tensor parallelism)."""

    tensor_rank: int = 0
    tensor_size: int = 1
    stage: int = 0
    stages: int = 1

    @classmethod
    def of(cls, index: int, tensor_size: int, stages: int) -> Rank:
        """The rank with this `index`."""
        return cls(index % tensor_size, tensor_size, index // tensor_size, stages)

    @property
    def index(self) -> int:
        """From 0 to the number of all ranks; the ranks of a stage follow each other."""
        return self.stage * self.tensor_size + self.tensor_rank

    @property
    def is_first(self) -> bool:
        """Whether it is of the stage that tokens go into."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether it is of the stage that logits come out of."""
        return self.stage == self.stages - 1

    @property
    def answers(self) -> bool:
        """Whether it is the one rank that draws tokens, and whose `Worker.run` returns output."""
        return self.is_last and self.tensor_rank == 0

    def __str__(self) -> str:
        return f"rank {self.index} (stage {self.stage}, tensor rank {self.tensor_rank})"


class Group(ABC):
    """How one rank's worker talks to those of other ranks. All tensors are contiguous and on the
    worker's device. A call returns when the result may be used, or is ordered before whatever
    follows on the device. Raises `RuntimeError` if that cannot be done within the blueprint's
    ``timeout_seconds``."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace ``tensor`` by its sum over the tensor ranks of this stage."""

    @abstractmethod
    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """``[N, C]`` of each tensor rank of this stage, side by side: ``[N, C * tensor_size]``."""

    @abstractmethod
    def send(self, tensor: torch.Tensor) -> None:
        """Give a copy of ``tensor`` to the same tensor rank of the next stage."""

    @abstractmethod
    def receive(self, tensor: torch.Tensor) -> None:
        """Fill ``tensor`` with what the previous stage sent, in the order that it did."""


class Alone(Group):
    """The group of a worker that has the whole model."""

    def __init__(self) -> None:
        super().__init__(Rank())

    def all_reduce(self, tensor: torch.Tensor) -> None: ...

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def send(self, tensor: torch.Tensor) -> None:
        raise RuntimeError("there is no next stage")

    def receive(self, tensor: torch.Tensor) -> None:
        raise RuntimeError("there is no previous stage")
