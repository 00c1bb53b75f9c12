"""The parameters of the decoder, allocated merged and filled from a loader."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import nn

from pageloom.contract import WeightLoader
from pageloom.models.architecture import DecoderArchitecture
from pageloom.models.slots import WeightSlots
from pageloom.ops.linear import Linear


@dataclass(slots=True)
class BlockWeights:
    """One layer. Layers that read the same input are merged, outputs in the order of the name."""

    attention_norm: torch.Tensor  # [hidden_size]
    qkv: nn.Module
    qk_norm: torch.Tensor | None  # [num_heads + num_kv_heads, head_size], a row per head
    output: nn.Module
    mlp_norm: torch.Tensor  # [hidden_size]
    gate_up: nn.Module
    down: nn.Module


@dataclass(slots=True)
class DecoderWeights:
    """All layers, and what comes before and after them."""

    embedding: torch.Tensor  # [vocab_size, hidden_size]
    blocks: list[BlockWeights]
    norm: torch.Tensor  # [hidden_size]
    head: nn.Module

    def parts(self) -> list[nn.Module | torch.Tensor]:
        """All of them, flat."""
        parts: list[nn.Module | torch.Tensor] = [self.embedding, self.norm, self.head]
        for block in self.blocks:
            parts += [getattr(block, f.name) for f in fields(block)]
        return [part for part in parts if part is not None]


def load_decoder_weights(
    arch: DecoderArchitecture, loader: WeightLoader, dtype: torch.dtype, device: torch.device
) -> DecoderWeights:
    """Allocate the parameters and stream every tensor of ``loader`` into its place.

    Linear layers that the loader supplies (`WeightLoader.linear`) are used as they are. Raises
    `UnsupportedModelError` that names the tensors which are missing, unexpected or misshapen.
    """
    return _Assembly(arch, loader, dtype, device).run()


class _Assembly:
    def __init__(
        self,
        arch: DecoderArchitecture,
        loader: WeightLoader,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._arch = arch
        self._loader = loader
        self._dtype = dtype
        self._device = device
        self._slots = WeightSlots()
        self._linears: list[Linear] = []

    def run(self) -> DecoderWeights:
        arch = self._arch
        embedding = self._tensor("model.embed_tokens.weight", arch.vocab_size, arch.hidden_size)
        weights = DecoderWeights(
            embedding=embedding,
            blocks=[self._block(f"model.layers.{i}") for i in range(len(arch.windows))],
            norm=self._tensor("model.norm.weight", arch.hidden_size),
            head=self._head(embedding),
        )
        self._slots.fill(self._loader.tensors())
        for block in weights.blocks:
            if block.qk_norm is not None:
                self._spread(block.qk_norm)
        for linear in self._linears:
            linear.finish()
        return weights

    def _block(self, name: str) -> BlockWeights:
        arch, attention, mlp = self._arch, f"{name}.self_attn", f"{name}.mlp"
        queries = arch.num_heads * arch.head_size
        keys = arch.num_kv_heads * arch.head_size
        return BlockWeights(
            attention_norm=self._tensor(f"{name}.input_layernorm.weight", arch.hidden_size),
            qkv=self._linear(
                [f"{attention}.{part}_proj" for part in "qkv"],
                arch.hidden_size,
                [queries, keys, keys],
                arch.qkv_bias,
            ),
            qk_norm=self._qk_norm(attention) if arch.qk_norm else None,
            output=self._linear(
                [f"{attention}.o_proj"], queries, [arch.hidden_size], arch.output_bias
            ),
            mlp_norm=self._tensor(f"{name}.post_attention_layernorm.weight", arch.hidden_size),
            gate_up=self._linear(
                [f"{mlp}.gate_proj", f"{mlp}.up_proj"],
                arch.hidden_size,
                [arch.intermediate_size] * 2,
                arch.mlp_bias,
            ),
            down=self._linear(
                [f"{mlp}.down_proj"], arch.intermediate_size, [arch.hidden_size], arch.mlp_bias
            ),
        )

    def _head(self, embedding: torch.Tensor) -> nn.Module:
        arch = self._arch
        if not arch.tied:
            return self._linear(["lm_head"], arch.hidden_size, [arch.vocab_size], False)
        self._slots.ignore("lm_head.weight")
        supplied = self._supplied(["lm_head"], arch.hidden_size, [arch.vocab_size], False)
        if supplied is not None:
            return supplied
        # Where weights are packed this holds the matrix twice: packed, the output layer takes
        # 0.6 of the time, and it is the largest single multiplication of a decode step.
        head = Linear(embedding, None)
        self._linears.append(head)
        return head

    def _linear(
        self, names: Sequence[str], in_features: int, out_features: Sequence[int], bias: bool
    ) -> nn.Module:
        supplied = self._supplied(names, in_features, out_features, bias)
        if supplied is not None:
            return supplied
        rows = sum(out_features)
        layer = Linear(self._empty(rows, in_features), self._empty(rows) if bias else None)
        for kind, parameter in (("weight", layer.weight), ("bias", layer.bias)):
            if parameter is not None:
                for name, part in zip(
                    names, torch.split(parameter, list(out_features)), strict=True
                ):
                    self._slots.add(f"{name}.{kind}", part)
        self._linears.append(layer)
        return layer

    def _supplied(
        self, names: Sequence[str], in_features: int, out_features: Sequence[int], bias: bool
    ) -> nn.Module | None:
        return self._loader.linear(
            names, in_features, out_features, bias, self._dtype, self._device
        )

    def _qk_norm(self, attention: str) -> torch.Tensor:
        arch = self._arch
        rows = self._empty(arch.num_heads + arch.num_kv_heads, arch.head_size)
        self._slots.add(f"{attention}.q_norm.weight", rows[0])
        self._slots.add(f"{attention}.k_norm.weight", rows[arch.num_heads])
        return rows

    def _spread(self, qk_norm: torch.Tensor) -> None:
        heads = self._arch.num_heads
        qk_norm[:heads] = qk_norm[0].clone()
        qk_norm[heads:] = qk_norm[heads].clone()

    def _tensor(self, name: str, *shape: int) -> torch.Tensor:
        tensor = self._empty(*shape)
        self._slots.add(name, tensor)
        return tensor

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)
