"""One decoder for the Llama family: llama, mistral, qwen2 and qwen3."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from pageloom.models.architecture import DecoderArchitecture
from pageloom.models.decoder_weights import DecoderWeights
from pageloom.models.model import Attend, Model
from pageloom.ops.activation import silu_and_mul
from pageloom.ops.choice import runs_fused
from pageloom.ops.norm import add_rms_norm, rms_norm
from pageloom.ops.rope import RotaryTable, norm_rotate_, rotate_


class Decoder(Model):
    """Pre-norm blocks of attention and a gated MLP (Touvron et al. 2023, arXiv:2302.13971).

    A step is a few large multiplications per layer with as few small kernels between them as
    torch and Triton allow: the time of a decode step would otherwise go into launching those.
    """

    supports_cuda_graphs = True

    def __init__(
        self, arch: DecoderArchitecture, rotary: RotaryTable, weights: DecoderWeights
    ) -> None:
        self.layers = arch.layer_specs()
        self.vocab_size = arch.vocab_size
        self._arch = arch
        self._rotary = rotary
        self._weights = weights

    @torch.inference_mode()
    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        arch, weights, eps = self._arch, self._weights, self._arch.norm_eps
        heads, kv_heads = arch.num_heads, arch.num_kv_heads
        cos, sin = self._rotary.at(positions)

        residual = F.embedding(token_ids, weights.embedding)
        # The kernel that normalises heads rotates them for nothing.
        rotated = runs_fused(residual) and weights.blocks[0].qk_norm is not None
        rotary = None
        if attend.fuses_rotary and not rotated:
            rotary = cos.squeeze(1), sin.squeeze(1)
        attended = residual.new_empty(len(token_ids), heads, arch.head_size)
        normed = rms_norm(residual, weights.blocks[0].attention_norm, eps)
        following = [block.attention_norm for block in weights.blocks[1:]] + [weights.norm]
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
            mixed = block.output(attended.flatten(1))
            normed = add_rms_norm(mixed, residual, block.mlp_norm, eps)
            mixed = block.down(silu_and_mul(block.gate_up(normed)))
            normed = add_rms_norm(mixed, residual, next_norm, eps)
        return normed

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._weights.head(hidden)
        return logits.float()

    def weights(self) -> Sequence[nn.Module | torch.Tensor]:
        return self._weights.parts()
