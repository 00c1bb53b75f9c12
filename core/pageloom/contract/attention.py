"""Attention backends.

A backend owns the physical KV cache of every layer and its layout, so it may define any page
format. The core owns which block belongs to whom; a backend sees only block numbers.

A whole plugin, two files. ``pyproject.toml``::

    [project]
    name = "pageloom-mine"
    version = "0.1"
    dependencies = ["pageloom"]

    [project.entry-points.pageloom]
    mine = "pageloom_mine"

``pageloom_mine.py``::

    import torch
    import torch.nn.functional as F
    from pageloom.contract import AttentionBackend, hookimpl

    contract_version = "1.0"

    @hookimpl
    def register_attention_backends(register):
        register("mine", "pageloom_mine:Mine")

    class Mine(AttentionBackend):
        @classmethod
        def check(cls, spec):
            if spec.quantizer is not None:
                return "stores the model's dtype only"
            if any(s.window or s.softcap or s.sinks for s in spec.layers):
                return "has no sliding window, softcap or sinks"

        def bytes_per_block(self):
            size = self.spec.dtype.itemsize * 2 * self.spec.block_size
            return sum(size * s.num_kv_heads * s.head_size for s in self.spec.layers)

        def allocate(self, num_blocks):
            self.slots = num_blocks * self.spec.block_size
            self.kv = [
                torch.empty(2, self.slots, s.num_kv_heads, s.head_size,
                            dtype=self.spec.dtype, device=self.spec.device)
                for s in self.spec.layers
            ]

        def plan(self, batch):
            self.batch = batch

        def forward(self, layer, q, k, v, out, sinks=None):
            spec, (keys, values), batch = self.spec.layers[layer], self.kv[layer], self.batch
            keys[batch.slots], values[batch.slots] = k, v
            size = self.spec.block_size
            for i in range(batch.num_seqs):
                start, end = batch.query_start_host[i], batch.query_start_host[i + 1]
                length = int(batch.seq_lens_host[i])
                at = torch.arange(length, device=q.device)
                at = batch.block_tables[i, at // size].long() * size + at % size
                mask = torch.ones(end - start, length, dtype=torch.bool, device=q.device)
                out[start:end] = F.scaled_dot_product_attention(
                    q[start:end].transpose(0, 1), keys[at].transpose(0, 1),
                    values[at].transpose(0, 1), scale=spec.scale, enable_gqa=True,
                    attn_mask=mask.tril(length - (end - start)),
                ).transpose(0, 1)

        def blocks(self):
            return [t.view(2, -1, self.spec.block_size, *t.shape[2:]) for t in self.kv]

        def copy_blocks(self, pairs):
            for kv in self.blocks():
                for source, target in pairs:
                    kv[:, target] = kv[:, source]

        def read_blocks(self, blocks):
            parts = [kv[:, blocks].transpose(0, 1).flatten(1) for kv in self.blocks()]
            return torch.cat(parts, 1).contiguous().view(torch.uint8).cpu()

        def write_blocks(self, blocks, data):
            flat = data.to(self.spec.device).view(self.spec.dtype)
            sizes = [kv[:, 0].numel() for kv in self.blocks()]
            for kv, part in zip(self.blocks(), flat.split(sizes, 1)):
                kv[:, blocks] = part.view(-1, 2, *kv.shape[2:]).transpose(0, 1)

Then ``attention: {backend: mine}`` in the YAML.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from pageloom.contract.component import Component

if TYPE_CHECKING:
    import torch

    from pageloom.contract.quantizer import KVQuantizer, VectorLayout


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One attention layer of the model."""

    num_heads: int
    num_kv_heads: int  # divides num_heads
    head_size: int  # elements of one q, k or v vector
    scale: float  # multiplies q . k before the softmax
    window: int | None = None  # a token sees itself and window - 1 tokens before it
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)
    sinks: bool = False  # `AttentionBackend.forward` is given a sink logit per head


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What the engine asks of a backend, fixed for the engine's life."""

    device: torch.device
    dtype: torch.dtype  # of q, k, v and out
    layers: tuple[LayerSpec, ...]
    block_size: int  # tokens per block, as `AttentionBackend.block_size` answered
    max_model_len: int  # tokens
    quantizer: str | None = None  # registered name of the KV format; None stores `dtype`
    layout: VectorLayout | None = None  # of that format, if it has one that kernels may know


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """One step, ragged: sequence i owns query rows ``query_start[i] : query_start[i + 1]``, which
    are its last tokens; decodes, prefill chunks and prefills behind a cached prefix in one call.

    Tensors lie on the engine's device; those ending in ``_host`` hold the same values on the CPU,
    so that planning needs no synchronisation. Everything is read-only and valid until the next
    `AttentionBackend.plan`. Sequences with exactly one query token come first.
    """

    query_start: torch.Tensor  # int32 [B + 1]
    seq_lens: torch.Tensor  # int32 [B], tokens to attend over, those of this step included
    block_tables: torch.Tensor  # int32 [B, most blocks]; rows are padded with 0
    slots: torch.Tensor  # int64 [T], block * block_size + offset, where each new K/V goes
    query_start_host: torch.Tensor
    seq_lens_host: torch.Tensor
    num_decodes: int  # leading sequences that have exactly one query token
    max_query_len: int
    max_seq_len: int

    @property
    def num_seqs(self) -> int:
        return len(self.seq_lens_host)

    @property
    def num_tokens(self) -> int:
        return len(self.slots)


class AttentionBackend(Component, ABC):
    """Stores K and V in blocks and attends over them.

    The engine calls `check` and `block_size` on the class, then makes one instance,
    `bytes_per_block`, `allocate`, and in each step `copy_blocks` / `write_blocks` /
    `read_blocks` if the plan asks for them, `plan` once, and `forward` once per layer. Calls never
    overlap, but the steps may come from another thread than the first calls. Only the backend
    touches its cache.

    Slots that their present owner has not written hold anything, NaN included, and must not
    reach a result.
    """

    auto_rank: ClassVar[int] = 0
    """``backend: auto`` takes the highest rank among the backends whose `check` accepts. 0 means
    that the backend runs only when it is named."""

    supports_cuda_graphs: ClassVar[bool] = False
    """Whether the calls of `forward` in a step of nothing but decodes can be captured in a CUDA
    graph that serves every later step of as many sequences: the engine then calls `plan`, and
    replays the graph instead of calling `forward`. Steps of other sizes, and steps with prefills,
    may come in between.

    The engine keeps the batch's tensors, q, k, v and out at the same addresses, in the same shapes
    and strides; block tables are as wide as ``max_model_len`` needs. Content, the ``_host``
    tensors and ``max_seq_len`` differ from step to step. A sequence may occur several times to fill
    the batch up, with the same token, slot and blocks; each time the same K and V are stored.

    The backend sees to it that `forward` neither synchronises nor reads host memory, and that what
    it launches (kernels, grids, arguments) follows from the number of sequences alone. What `plan`
    derives from lengths, slots or blocks, it puts where the captured kernels find it: always at the
    same address for a number of sequences. `plan` itself is not captured and works, as ever, in
    order with the current stream."""

    fuses_rotary: ClassVar[bool] = False
    """Whether `forward` rotates q and k itself (rotary position embedding, Su et al. 2021,
    arXiv:2104.09864), which it does while it reads them anyway. Its last parameter is then::

        rotary: tuple[torch.Tensor, torch.Tensor] | None = None

    Where that is given, q and k are not rotated yet: the backend attends with rotated q and stores
    rotated k. It may overwrite q and k, which nobody reads afterwards. Some layers' calls may give
    it and others not, the same ones in each step. A backend that does not say so is never given it.

    It is ``(cos, sin)``, both ``[T, head_size]`` of ``spec.dtype`` and contiguous, for an even
    head size. A vector x of token t becomes ``x * cos[t] + x' * sin[t]``, where x' is x with its
    halves exchanged, ``x'[d] = x[(d + head_size / 2) % head_size]``: elements half a head apart
    form a pair. The halves of a row of ``cos`` are equal; the first of ``sin`` is minus the second.
    Both may be scaled, so a rotation may also stretch.

    The arithmetic is float32. Rotated k is rounded to ``spec.dtype`` once, and coded, if a
    quantizer does that, from there; rotated q may be rounded so."""

    def __init__(self, config: Any, spec: AttentionSpec, quantizer: KVQuantizer | None) -> None:
        """``quantizer`` is the instance behind ``spec.quantizer``, None if that is None."""
        super().__init__(config)
        self.spec = spec
        self.quantizer = quantizer

    @classmethod
    @abstractmethod
    def check(cls, spec: AttentionSpec) -> str | None:
        """None if this backend can do all of ``spec`` on this machine, else the reason it cannot.

        The reason completes the sentence "<backend> ...", such as "needs an NVIDIA GPU" or
        "supports head sizes 64 and 128, not 80". Must be cheap and free of side effects.
        """

    @classmethod
    def block_size(cls, requested: int | None, max_model_len: int) -> int:
        """Tokens per block: ``requested`` (``kv_cache.block_size``) or a choice of its own.

        Raises `ValueError` if it cannot honour what was requested.
        """
        return requested or 16

    @abstractmethod
    def bytes_per_block(self) -> int:
        """Bytes that one block takes, all layers, K and V, scales and padding included."""

    @abstractmethod
    def allocate(self, num_blocks: int) -> None:
        """Allocate the cache for block numbers ``0 .. num_blocks - 1``. Called once."""

    @abstractmethod
    def plan(self, batch: AttentionBatch) -> None:
        """Prepare for one step; what all layers share is computed here once."""

    @abstractmethod
    def forward(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Store this step's K and V of one layer, then attend causally over what is stored.

        Everything is stored before anything is attended to: a sequence's blocks may be written by
        another sequence of the same step that begins with the same tokens.

        With a lossy quantizer a token is attended to as it is stored, in its own step too, so
        that chunking cannot change a result.

        ``q`` and ``out`` are ``[T, num_heads, head_size]``, ``k`` and ``v`` are ``[T,
        num_kv_heads, head_size]``, of ``spec.dtype``; each row is contiguous, but rows may be
        strided, since q, k and v are often slices of one matrix. ``out`` is overwritten;
        nothing else is changed. ``sinks`` is floating ``[num_heads]``: a logit that joins each
        softmax but carries no value. Backends that say so take ``rotary``, see `fuses_rotary`.
        """

    @abstractmethod
    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks ``(source, target)`` of every layer, as if all at once: no block is
        a target twice, and none is both a source and a target."""

    @abstractmethod
    def read_blocks(self, blocks: Sequence[int]) -> torch.Tensor:
        """The content of blocks, all layers: ``uint8 [len(blocks), bytes_per_block]`` on the
        CPU, in a layout of the backend's own, contiguous and not aliasing the cache."""

    @abstractmethod
    def write_blocks(self, blocks: Sequence[int], data: torch.Tensor) -> None:
        """Put what `read_blocks` returned into (possibly other) blocks."""
