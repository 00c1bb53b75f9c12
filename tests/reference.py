"""Slow and obvious counterparts of the data plane, for tests only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from pageloom.contract import LayerSpec, WeightLoader


def random_model(config: PretrainedConfig) -> PreTrainedModel:
    """A model of `transformers` in which every parameter makes a difference."""
    torch.manual_seed(1)
    # Eager attention is the one that knows softcaps and sinks.
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # all zeros otherwise
            torch.nn.init.uniform_(parameter, -0.3, 0.3)
        elif "norm" in name or "ln_" in name:  # all ones otherwise
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


class InMemoryLoader(WeightLoader):
    """Serves a state dict that is already there, such as that of a `transformers` model."""

    def __init__(self, hf_config: Any, state: Mapping[str, torch.Tensor]) -> None:
        super().__init__(self.Config(), path="memory")
        self.hf_config = hf_config
        self.state = state

    @classmethod
    def detect(cls, path: str) -> bool:
        return False

    def model_config(self) -> Any:
        return self.hf_config

    def tokenizer(self) -> None:
        return None

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.state.items()


class DenseAttention:
    """Attention over lists of K and V per sequence, in float32, one sequence at a time.

    `step` names the sequences and how many tokens each has in the coming call; the instance is
    then the `attend` argument of that call.
    """

    def __init__(self, layers: Sequence[LayerSpec]) -> None:
        self.layers = layers
        self._cache: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._step: list[tuple[int, int]] = []

    def step(self, lengths: Sequence[tuple[int, int]]) -> DenseAttention:
        """The coming call holds, in this order, (sequence, new tokens)."""
        self._step = list(lengths)
        return self

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> None:
        spec = self.layers[layer]
        assert q.shape == out.shape == (len(q), spec.num_heads, spec.head_size)
        assert k.shape == v.shape == (len(q), spec.num_kv_heads, spec.head_size)
        assert sum(length for _, length in self._step) == len(q)
        assert (sinks is not None) == spec.sinks
        start = 0
        for sequence, length in self._step:
            rows = slice(start, start + length)
            keys, values = self._extend(layer, sequence, k[rows].float(), v[rows].float())
            out[rows] = attend_densely(spec, q[rows].float(), keys, values, sinks).to(out.dtype)
            start += length

    def _extend(
        self, layer: int, sequence: int, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if (layer, sequence) in self._cache:
            keys, values = self._cache[layer, sequence]
            k, v = torch.cat((keys, k)), torch.cat((values, v))
        self._cache[layer, sequence] = k, v
        return k, v


def attend_densely(
    spec: LayerSpec,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """``q [Q, H, D]``, the last Q of the L positions in ``k``, ``v [L, Hkv, D]``; all float32."""
    group = spec.num_heads // spec.num_kv_heads
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    at = torch.arange(len(k) - len(q), len(k))[:, None]
    key = torch.arange(len(k))[None, :]
    hidden = key > at
    if spec.window is not None:
        hidden |= key <= at - spec.window
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        column = sinks.float()[:, None, None].expand(-1, len(q), 1)
        scores = torch.cat((scores, column), -1)
    weights = scores.softmax(-1)[..., : len(k)]
    return torch.einsum("hqk,khd->qhd", weights, v)
