"""What the runner knows of a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import nn

from pageloom.contract import Alone, AttentionBackend, Group, LayerSpec

ALONE = Alone()
K = TypeVar("K")
V = TypeVar("V")


class UnsupportedModelError(ValueError):
    """A model that Pageloom cannot serve; the message names the model and the reason."""


class Attend:
    """`AttentionBackend.forward` of the step that is being computed."""

    def __init__(self, forward: Callable[..., None], fuses_rotary: bool = False) -> None:
        """``forward`` takes ``rotary`` if ``fuses_rotary``, see `AttentionBackend.fuses_rotary`."""
        self._forward = forward
        self.fuses_rotary = fuses_rotary

    @classmethod
    def of(cls, backend: AttentionBackend) -> Attend:
        return cls(backend.forward, backend.fuses_rotary)

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
        rotary: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """``rotary`` may be given if `fuses_rotary`."""
        if rotary is None:
            self._forward(layer, q, k, v, out, sinks)
        else:
            self._forward(layer, q, k, v, out, sinks, rotary)


class Model(ABC):
    """A causal language model over flat tokens.

    The tokens of all sequences in a step are concatenated: no batch dimension and no padding.
    Everything but attention is computed per token, so which tokens share a call changes nothing
    but rounding. Weights are loaded when the constructor returns.

    It may be one rank's part of a model. Then all ranks of a stage make the same calls of `forward`
    in the same order, and those of the last stage the same of `logits`.
    """

    layers: tuple[LayerSpec, ...]
    """The attention layers, in the order of the ``layer`` argument of `Attend`."""
    vocab_size: int
    first_layer: int = 0
    """Which layer of the whole model the first of `layers` is."""
    group: Group = ALONE
    """How it talks to the ranks that have its other parts."""
    supports_cuda_graphs: bool = False
    """Whether `forward`, less what its ``attend`` does, launches the same for every ``T`` tokens,
    without waiting for the device, so that a CUDA graph of it serves other tokens and positions."""

    @abstractmethod
    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """The final hidden states ``[T, hidden_size]`` of ``token_ids`` int64 ``[T]``; of a stage
        that is not the last what it has sent to the next, which is of no further use.

        ``positions`` int64 ``[T]`` counts from 0 within each sequence and stays below the
        ``max_model_len`` that the model was built with. Calls ``attend`` once per layer, in order.
        """

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 ``[N, vocab_size]`` for rows ``hidden [N, hidden_size]`` of `forward`, in the
        last stage."""

    def of_own_layers(self, numbers: Mapping[tuple[int, K], V]) -> dict[tuple[int, K], V]:
        """``numbers`` by layer of the whole model, as `WeightLoader.kv_scales` has them: those of
        `layers`, by the ``layer`` argument of `Attend`. The last stage has those of layers that
        there are not, too: it is for the reader to refuse them."""
        first, end = self.first_layer, self.first_layer + len(self.layers)
        return {
            (layer - first, key): number
            for (layer, key), number in numbers.items()
            if layer >= first and (layer < end or self.group.rank.is_last)
        }

    def weights(self) -> Sequence[nn.Module | torch.Tensor]:
        """Everything that holds weights, to be counted; a model that computes without any has
        none. Parts may share tensors."""
        return ()
