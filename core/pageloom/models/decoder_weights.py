"""The parameters of the decoder, allocated merged and filled from a loader."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from torch import nn

from pageloom.contract import Slice, WeightLoader
from pageloom.models.architecture import DecoderArchitecture
from pageloom.models.linears import LinearLayers
from pageloom.models.shards import Shard
from pageloom.models.slots import WeightSlots

EMBEDDING, NORM, HEAD = "model.embed_tokens", "model.norm", "lm_head"


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
    """The layers of one rank, and what comes before and after them if it has that."""

    embedding: torch.Tensor | None  # [tokens of this rank, hidden_size], of the first stage
    blocks: list[BlockWeights]
    norm: torch.Tensor | None  # [hidden_size], of the last stage
    head: nn.Module | None  # for the tokens of this rank, of the last stage

    def parts(self) -> list[nn.Module | torch.Tensor]:
        """All of them, flat."""
        parts: list[nn.Module | torch.Tensor | None] = [self.embedding, self.norm, self.head]
        for block in self.blocks:
            parts += [getattr(block, f.name) for f in fields(block)]
        return [part for part in parts if part is not None]


def load_decoder_weights(
    arch: DecoderArchitecture,
    shard: Shard,
    loader: WeightLoader,
    dtype: torch.dtype,
    device: torch.device,
) -> DecoderWeights:
    """Allocate this rank's parameters and stream what ``loader`` has for them into their places.

    ``arch`` is that of the whole model. Linear layers that the loader supplies
    (`WeightLoader.linear`) are used as they are. Raises `UnsupportedModelError` that names the
    tensors which are missing, unexpected or misshapen.
    """
    return _Assembly(arch, shard, loader, dtype, device).run()


class _Assembly:
    def __init__(
        self,
        arch: DecoderArchitecture,
        shard: Shard,
        loader: WeightLoader,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._arch = arch
        self._shard = shard
        self._loader = loader
        self._dtype = dtype
        self._device = device
        self._slots = WeightSlots()
        self._linears = LinearLayers(loader, self._slots, shard.rank, dtype, device)

    def run(self) -> DecoderWeights:
        rank, hidden = self._shard.rank, self._arch.hidden_size
        embedding = self._embedding() if rank.is_first else None
        weights = DecoderWeights(
            embedding=embedding,
            blocks=[self._block(f"model.layers.{layer}") for layer in self._shard.layers],
            norm=self._tensor(f"{NORM}.weight", hidden) if rank.is_last else None,
            head=self._head(embedding) if rank.is_last else None,
        )
        self._slots.leave_out_others(tensor_names(self._arch))
        self._slots.fill(self._loader.tensors_of(self._slots.parts()))
        for block in weights.blocks:
            if block.qk_norm is not None:
                self._spread(block.qk_norm)
        self._linears.finish()
        return weights

    def _block(self, name: str) -> BlockWeights:
        arch, shard, attention, mlp = self._arch, self._shard, f"{name}.self_attn", f"{name}.mlp"
        size, hidden, width = arch.head_size, arch.hidden_size, arch.intermediate_size
        all_queries, all_keys = arch.num_heads * size, arch.num_kv_heads * size
        queries = range(shard.heads.start * size, shard.heads.stop * size)
        keys = range(shard.kv_heads.start * size, shard.kv_heads.stop * size)
        neurons = shard.mlp(arch, self._linears.input_unit(f"{mlp}.down_proj"))
        return BlockWeights(
            attention_norm=self._tensor(f"{name}.input_layernorm.weight", hidden),
            qkv=self._linears.by_outputs(
                [f"{attention}.{part}_proj" for part in "qkv"],
                hidden,
                [all_queries, all_keys, all_keys],
                arch.qkv_bias,
                [queries, keys, keys],
            ),
            qk_norm=self._qk_norm(attention) if arch.qk_norm else None,
            output=self._linears.by_inputs(
                f"{attention}.o_proj", all_queries, hidden, arch.output_bias, queries
            ),
            mlp_norm=self._tensor(f"{name}.post_attention_layernorm.weight", hidden),
            gate_up=self._linears.by_outputs(
                [f"{mlp}.gate_proj", f"{mlp}.up_proj"],
                hidden,
                [width, width],
                arch.mlp_bias,
                [neurons, neurons],
            ),
            down=self._linears.by_inputs(f"{mlp}.down_proj", width, hidden, arch.mlp_bias, neurons),
        )

    def _embedding(self) -> torch.Tensor:
        """Of this rank's tokens."""
        vocab, size = self._shard.vocab, self._arch.vocab_size
        part = Slice(0, vocab.start, vocab.stop, size) if len(vocab) < size else None
        return self._tensor(f"{EMBEDDING}.weight", len(vocab), self._arch.hidden_size, part=part)

    def _head(self, embedding: torch.Tensor | None) -> nn.Module:
        arch, vocab = self._arch, self._shard.vocab
        hidden, size = arch.hidden_size, arch.vocab_size
        if not arch.tied:
            return self._linears.by_outputs([HEAD], hidden, [size], False, [vocab])
        part = Slice(0, vocab.start, vocab.stop, size)
        supplied = self._linears.supplied([HEAD], hidden, [size], False, [part])
        if supplied is not None:
            return supplied
        # Where weights are packed this holds the matrix twice: packed, the output layer takes
        # 0.6 of the time, and it is the largest single multiplication of a decode step.
        return self._linears.sharing(self._embedding() if embedding is None else embedding)

    def _qk_norm(self, attention: str) -> torch.Tensor:
        heads, kv_heads = len(self._shard.heads), len(self._shard.kv_heads)
        rows = self._empty(heads + kv_heads, self._arch.head_size)
        self._slots.add(f"{attention}.q_norm.weight", rows[0])
        self._slots.add(f"{attention}.k_norm.weight", rows[heads])
        return rows

    def _spread(self, qk_norm: torch.Tensor) -> None:
        heads = len(self._shard.heads)
        qk_norm[:heads] = qk_norm[0].clone()
        qk_norm[heads:] = qk_norm[heads].clone()

    def _tensor(self, name: str, *shape: int, part: Slice | None = None) -> torch.Tensor:
        tensor = self._empty(*shape)
        self._slots.add(name, tensor, part)
        return tensor

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)


def tensor_names(arch: DecoderArchitecture) -> Iterator[str]:
    """All tensors that there may be in a checkpoint of the model."""
    yield from (f"{EMBEDDING}.weight", f"{NORM}.weight", f"{HEAD}.weight")
    biased = {f"self_attn.{part}_proj": arch.qkv_bias for part in "qkv"}
    biased["self_attn.o_proj"] = arch.output_bias
    biased |= {f"mlp.{part}_proj": arch.mlp_bias for part in ("gate", "up", "down")}
    biased |= dict.fromkeys(("input_layernorm", "post_attention_layernorm"), False)
    if arch.qk_norm:
        biased |= dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), False)
    for layer in range(len(arch.windows)):
        for module, bias in biased.items():
            yield f"model.layers.{layer}.{module}.weight"
            if bias:
                yield f"model.layers.{layer}.{module}.bias"
