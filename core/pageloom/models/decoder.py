"""One decoder for the Llama family: llama, mistral, qwen2 and qwen3."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from pageloom.contract import Group
from pageloom.models.architecture import DecoderArchitecture
from pageloom.models.decoder_weights import DecoderWeights
from pageloom.models.model import Attend, Model
from pageloom.models.shards import Shard
from pageloom.ops.activation import silu_and_mul
from pageloom.ops.choice import runs_fused
from pageloom.ops.norm import add_rms_norm, rms_norm
from pageloom.ops.rope import RotaryTable, norm_rotate_, rotate_


class Decoder(Model):
    """Pre-norm blocks of attention and a gated MLP (Touvron et al. 2023, arXiv:2302.13971).

    A step is a few large multiplications per layer with as few small kernels between them as
    torch and Triton allow: the time of a decode step would otherwise go into launching those.
    """

    def __init__(
        self,
        arch: DecoderArchitecture,
        shard: Shard,
        rotary: RotaryTable,
        weights: DecoderWeights,
        group: Group,
    ) -> None:
        """``arch`` is that of the whole model, ``weights`` are what ``shard`` has of it."""
        self.layers = shard.own(arch).layer_specs()
        self.first_layer = shard.layers.start
        self.vocab_size = arch.vocab_size
        self.group = group
        # Not every group's calls can be recorded.
        self.supports_cuda_graphs = shard.rank.tensor_size == shard.rank.stages == 1
        self._arch = arch
        self._shard = shard
        self._rotary = rotary
        self._weights = weights
        self._divided = shard.rank.tensor_size > 1

    @torch.inference_mode()
    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        arch, weights, eps = self._arch, self._weights, self._arch.norm_eps
        heads, kv_heads = len(self._shard.heads), len(self._shard.kv_heads)
        cos, sin = self._rotary.at(positions)

        residual = self._embed(token_ids)
        # The kernel that normalises heads rotates them for nothing.
        rotated = runs_fused(residual) and weights.blocks[0].qk_norm is not None
        rotary = None
        if attend.fuses_rotary and not rotated:
            rotary = cos.squeeze(1), sin.squeeze(1)
        attended = residual.new_empty(len(token_ids), heads, arch.head_size)
        normed = rms_norm(residual, weights.blocks[0].attention_norm, eps)
        following = [*(block.attention_norm for block in weights.blocks[1:]), weights.norm]
        for layer, (block, next_norm) in enumerate(zip(weights.blocks, following, strict=True)):
            qkv = block.qkv(normed).view(-1, heads + 2 * kv_heads, arch.head_size)
            qk, v = qkv.narrow(1, 0, heads + kv_heads), qkv.narrow(1, heads + kv_heads, kv_heads)
            if rotary is not None:
                qk = qk if block.qk_norm is None else rms_norm(qk, block.qk_norm, eps)
            elif block.qk_norm is None:
                rotate_(qk, cos, sin)
            else:
                qk = norm_rotate_(qk, block.qk_norm, eps, cos, sin)
            q, k = qk.narrow(1, 0, heads), qk.narrow(1, heads, kv_heads)
            attend(layer, q, k, v, attended, rotary=rotary)
            mixed = self._sum(block.output(attended.flatten(1)))
            normed = add_rms_norm(mixed, residual, block.mlp_norm, eps)
            mixed = self._sum(block.down(silu_and_mul(block.gate_up(normed))))
            if next_norm is None:
                self.group.send(residual.add_(mixed))
                return residual
            normed = add_rms_norm(mixed, residual, next_norm, eps)
        return normed

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._weights.head is None:
            raise RuntimeError(f"{self._shard.rank} is not of the last stage, which has logits")
        logits: torch.Tensor = self._weights.head(hidden)
        return (self._gather(logits) if self._divided else logits).float()

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """What the first layer adds to, ``[T, hidden_size]``."""
        embedding, vocab = self._weights.embedding, self._shard.vocab
        if embedding is None:
            norm = self._weights.blocks[0].attention_norm
            residual = norm.new_empty(len(token_ids), self._arch.hidden_size)
            self.group.receive(residual)
            return residual
        if not self._divided:
            return F.embedding(token_ids, embedding)
        own = (token_ids >= vocab.start) & (token_ids < vocab.stop)
        rows = F.embedding((token_ids - vocab.start) * own, embedding)
        return self._sum(rows.mul_(own[:, None]))

    def _sum(self, partial: torch.Tensor) -> torch.Tensor:
        """Over the tensor ranks, in place."""
        if self._divided:
            self.group.all_reduce(partial)
        return partial

    def _gather(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits of all tokens from those of each rank's."""
        vocabs = self._shard.vocabs
        width = len(vocabs[0])
        if logits.shape[1] < width:
            logits = F.pad(logits, (0, width - logits.shape[1]))
        logits = self.group.all_gather(logits)
        if logits.shape[1] == self.vocab_size:
            return logits
        parts = [logits.narrow(1, n * width, len(vocab)) for n, vocab in enumerate(vocabs)]
        return torch.cat(parts, 1)

    def weights(self) -> Sequence[nn.Module | torch.Tensor]:
        return self._weights.parts()
