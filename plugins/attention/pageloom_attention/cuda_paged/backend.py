"""The backend ``cuda_paged``."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure
from typing import Any, ClassVar

import torch

from pageloom.contract import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    KVQuantizer,
)
from pageloom_attention.cuda_paged import nvrtc
from pageloom_attention.cuda_paged.instance import (
    MAX_HEAD_SIZE,
    THREADS,
    TYPES,
    Instance,
    Kernels,
)
from pageloom_attention.cuda_paged.params import AttentionParams, CopyParams, StoreParams

OLDEST = (8, 0)  # compute capability: mma of bfloat16, and cp.async


class CUDAPaged(AttentionBackend):
    """Split-KV decodes and FlashAttention-2 prefills over the paged cache, in one step.

    A layer's cache is ``[num_blocks, 2, num_kv_heads, block_size, head_size]``, K and V, so a block
    is one piece of memory, and so are a head's vectors in it. Of a KV format that is coded, the
    last side is bytes of codes; scales that vectors carry lie apart, a word each, in the same
    order. The kernels write the codes and widen them to the dtype as they read; constant scales
    are left to the softmax and to the end.

    What a decode launches depends on the batch size alone, and `plan` keeps nothing of a batch of
    decodes but its tensors, as CUDA graphs need.
    """

    # Only on request: so far the kernels have run in an emulator, and on no GPU.
    auto_rank = 0
    supports_cuda_graphs = True

    min_split_tokens: ClassVar[int] = 256
    """Shorter contexts are not split: a part must be worth a merge."""

    @classmethod
    def check(cls, spec: AttentionSpec) -> str | None:
        if spec.device.type != "cuda" or torch.version.cuda is None:
            return f"needs an NVIDIA GPU, not {spec.device}"
        if not torch.cuda.is_available():
            return "needs an NVIDIA GPU: torch finds none"
        capability = torch.cuda.get_device_capability(spec.device)
        if capability < OLDEST:
            return f"needs compute capability 8.0 or newer, not {capability[0]}.{capability[1]}"
        if reason := nvrtc.missing():
            return f"needs {reason}: pip install 'pageloom[cuda]'"
        return cls.check_shapes(spec)

    @classmethod
    def check_shapes(cls, spec: AttentionSpec) -> str | None:
        """Why there are no kernels for ``spec`` on any GPU, None if there are."""
        if spec.dtype not in TYPES:
            return f"computes in float32, bfloat16 and float16, not {spec.dtype}"
        if spec.quantizer is not None and spec.layout is None:
            return (
                f"has kernels for KV formats with a VectorLayout, and {spec.quantizer} has none: "
                "torch_paged runs every format"
            )
        for layer in spec.layers:
            if layer.head_size % 16 or layer.head_size > MAX_HEAD_SIZE:
                return (
                    f"supports head sizes that are multiples of 16 up to {MAX_HEAD_SIZE}, "
                    f"not {layer.head_size}"
                )
        return None

    def __init__(self, config: Any, spec: AttentionSpec, quantizer: KVQuantizer | None) -> None:
        super().__init__(config, spec, quantizer)
        self.instances = [
            Instance(
                spec.dtype,
                layer.head_size,
                layer.num_heads // layer.num_kv_heads,
                spec.block_size,
                spec.layout,
            )
            for layer in spec.layers
        ]
        loaded = {instance: self.load(instance) for instance in dict.fromkeys(self.instances)}
        self.kernels = [loaded[instance] for instance in self.instances]
        self.cache: list[torch.Tensor] = []
        self.scales: list[torch.Tensor | None] = []
        self._constants = [self._constant_scales(layer) for layer in range(len(spec.layers))]
        self._inverses = [tuple(map(_inverse, scales)) for scales in self._constants]
        # Two thread blocks per multiprocessor, which is what the registers of most decodes allow.
        self._wanted_blocks = 2 * self.multiprocessors()
        # Splits are bounded by the wanted blocks, each of which has some 16 rows of partials.
        rows = max(min(16, i.group) * (i.head_size + 2) for i in self.instances)
        self._partials = torch.empty(
            self._wanted_blocks * rows, dtype=torch.float32, device=spec.device
        )
        self._work: dict[tuple[int, int], torch.Tensor] = {}

    def load(self, instance: Instance) -> Kernels:
        """Compile ``instance`` and make it ready to run."""
        from pageloom_attention.cuda_paged.driver import DriverKernels

        return DriverKernels(instance, self.spec.device)

    def multiprocessors(self) -> int:
        return torch.cuda.get_device_properties(self.spec.device).multi_processor_count

    def bytes_per_block(self) -> int:
        each = zip(self.spec.layers, self.instances, strict=True)
        vectors = 2 * self.spec.block_size
        return sum(
            vectors * layer.num_kv_heads * (i.vector_bytes + 4 * i.has_scales) for layer, i in each
        )

    def allocate(self, num_blocks: int) -> None:
        dtype, device = self.spec.dtype, self.spec.device
        for spec, instance in zip(self.spec.layers, self.instances, strict=True):
            shape = (num_blocks, 2, spec.num_kv_heads, self.spec.block_size)
            if instance.layout is None:
                cache = torch.empty((*shape, spec.head_size), dtype=dtype, device=device)
            else:
                width = instance.vector_bytes
                cache = torch.empty((*shape, width), dtype=torch.uint8, device=device)
            self.cache.append(cache)
            self.scales.append(
                torch.empty(shape, dtype=torch.int32, device=device)
                if instance.has_scales
                else None
            )

    def plan(self, batch: AttentionBatch) -> None:
        self._batch = batch
        self._work = {}
        if batch.num_decodes < batch.num_seqs:
            for i in self.instances:
                key = (i.group, i.prefill_rows)
                if key not in self._work:
                    work = prefill_work(batch, *key)
                    self._work[key] = work.to(self.spec.device, non_blocking=True)

    def forward(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> None:
        q, k, v = _aligned(q), _aligned(k), _aligned(v)
        target = (
            out if _is_aligned(out) else torch.empty(out.shape, dtype=out.dtype, device=out.device)
        )
        if sinks is not None:
            sinks = sinks.float().contiguous()
        self._store(layer, k, v)
        if self._batch.num_decodes:
            self._decode(layer, q, target, sinks)
        if self._work:
            self._prefill(layer, q, target, sinks)
        if target is not out:
            out.copy_(target)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        if not pairs:
            return
        given = torch.tensor(pairs, dtype=torch.int32).to(self.spec.device)
        for kernels, cache, scales in zip(self.kernels, self.cache, self.scales, strict=True):
            self._copy(kernels, "copy", 16, cache, given)
            if scales is not None:
                self._copy(kernels, "copy_scales", 8, scales, given)

    def read_blocks(self, blocks: Sequence[int]) -> torch.Tensor:
        index = torch.tensor(blocks, dtype=torch.int64, device=self.spec.device)
        return torch.cat([held[index] for held in self._bytes()], dim=1).cpu()

    def write_blocks(self, blocks: Sequence[int], data: torch.Tensor) -> None:
        index = torch.tensor(blocks, dtype=torch.int64, device=self.spec.device)
        all_bytes = self._bytes()
        parts = data.to(self.spec.device).split([held.shape[1] for held in all_bytes], dim=1)
        for held, part in zip(all_bytes, parts, strict=True):
            held[index] = part

    @staticmethod
    def _copy(
        kernels: Kernels, part: str, word: int, held: torch.Tensor, pairs: torch.Tensor
    ) -> None:
        """Copy blocks of ``held`` in words of ``word`` bytes."""
        words = held[0].numel() * held.itemsize // word
        blocks = min(-(-words // THREADS), 32)
        # The grid's second side is limited.
        for some in pairs.split(65535):
            params = CopyParams(held.data_ptr(), some.data_ptr(), words)
            kernels.launch(part, (blocks, len(some), 1), THREADS, params)

    def _bytes(self) -> list[torch.Tensor]:
        """The cache, views ``uint8 [num_blocks, bytes]``."""
        both = zip(self.cache, self.scales, strict=True)
        return [x.view(torch.uint8).flatten(1) for pair in both for x in pair if x is not None]

    def _store(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        spec, batch = self.spec.layers[layer], self._batch
        params = StoreParams(
            k=k.data_ptr(),
            v=v.data_ptr(),
            cache=self.cache[layer].data_ptr(),
            scales=self._scales_at(layer),
            slots=batch.slots.data_ptr(),
            k_stride=k.stride(0),
            v_stride=v.stride(0),
            num_tokens=batch.num_tokens,
            num_kv_heads=spec.num_kv_heads,
            key_inverse=self._inverses[layer][0],
            value_inverse=self._inverses[layer][1],
            most=self._most,
        )
        threads = 2 * batch.num_tokens * spec.num_kv_heads * self.instances[layer].store_threads
        self.kernels[layer].launch("store", (-(-threads // THREADS), 1, 1), THREADS, params)

    def _decode(
        self, layer: int, q: torch.Tensor, out: torch.Tensor, sinks: torch.Tensor | None
    ) -> None:
        spec, kernels, instance = (
            self.spec.layers[layer],
            self.kernels[layer],
            self.instances[layer],
        )
        count, columns = self._batch.num_decodes, spec.num_kv_heads * instance.decode_tiles
        longest = min(self.spec.max_model_len, spec.window or self.spec.max_model_len)
        splits = min(
            -(-longest // self.min_split_tokens), max(1, self._wanted_blocks // (count * columns))
        )
        params = self._attention(layer, q, out, sinks, splits)
        kernels.launch("decode", (count, columns, splits), THREADS, params)
        if splits > 1:
            kernels.launch("merge", (count, spec.num_heads, 1), spec.head_size // 2, params)

    def _prefill(
        self, layer: int, q: torch.Tensor, out: torch.Tensor, sinks: torch.Tensor | None
    ) -> None:
        spec, instance = self.spec.layers[layer], self.instances[layer]
        work = self._work[instance.group, instance.prefill_rows]
        params = self._attention(layer, q, out, sinks, splits=1)
        params.work = work.data_ptr()
        grid = (len(work), spec.num_kv_heads * instance.prefill_tiles, 1)
        self.kernels[layer].launch("prefill", grid, THREADS, params)

    def _attention(
        self,
        layer: int,
        q: torch.Tensor,
        out: torch.Tensor,
        sinks: torch.Tensor | None,
        splits: int,
    ) -> Structure:
        spec, batch = self.spec.layers[layer], self._batch
        return AttentionParams(
            q=q.data_ptr(),
            out=out.data_ptr(),
            cache=self.cache[layer].data_ptr(),
            scales=self._scales_at(layer),
            block_tables=batch.block_tables.data_ptr(),
            seq_lens=batch.seq_lens.data_ptr(),
            query_start=batch.query_start.data_ptr(),
            sinks=None if sinks is None else sinks.data_ptr(),
            partials=self._partials.data_ptr(),
            q_stride=q.stride(0),
            out_stride=out.stride(0),
            table_stride=batch.block_tables.stride(0),
            num_kv_heads=spec.num_kv_heads,
            window=spec.window or 0,
            splits=splits,
            min_split_tokens=self.min_split_tokens,
            scale=spec.scale * self._constants[layer][0],
            value_scale=self._constants[layer][1],
            softcap=spec.softcap or 0.0,
        )

    def _scales_at(self, layer: int) -> int | None:
        scales = self.scales[layer]
        return None if scales is None else scales.data_ptr()

    def _constant_scales(self, layer: int) -> tuple[float, float]:
        """Those of K and V in a format of constant scales, else 1."""
        layout = self.spec.layout
        if self.quantizer is None or layout is None or layout.scaling != "static":
            return 1.0, 1.0
        return self.quantizer.static_scale(layer, "k"), self.quantizer.static_scale(layer, "v")

    @property
    def _most(self) -> float:
        """What a vector with its own scale is limited to: see `VectorLayout`."""
        layout = self.spec.layout
        halves = layout is not None and layout.element == "int4"
        return 0.875 * torch.finfo(torch.float16 if halves else self.spec.dtype).max


def prefill_work(batch: AttentionBatch, group: int, rows: int) -> torch.Tensor:
    """Which sequence and which of its rows each thread block of a prefill has.

    A sequence with n query tokens has n * ``group`` rows, and a thread block takes ``rows`` of
    them. Returns int32 ``[thread blocks, 2]`` on the CPU: sequence, and first row. Late rows, which
    attend to more, come first, so that no long one starts last.
    """
    counts = batch.query_start_host.diff()[batch.num_decodes :] * group
    tiles = (counts + rows - 1) // rows
    sequence = torch.arange(batch.num_decodes, batch.num_seqs).repeat_interleave(tiles)
    tile = torch.arange(len(sequence)) - (tiles.cumsum(0) - tiles).repeat_interleave(tiles)
    return torch.stack([sequence, tile * rows], dim=1).flip(0).to(torch.int32).contiguous()


def _inverse(scale: float) -> float:
    """As float32 has it."""
    return (1 / torch.tensor(scale, dtype=torch.float32)).item()


def _is_aligned(x: torch.Tensor) -> bool:
    """Whether each row begins at a multiple of 16 bytes, as the kernels' loads need it."""
    return x.data_ptr() % 16 == 0 and x.stride(0) * x.itemsize % 16 == 0


def _aligned(x: torch.Tensor) -> torch.Tensor:
    return x if _is_aligned(x) else x.clone(memory_format=torch.contiguous_format)
