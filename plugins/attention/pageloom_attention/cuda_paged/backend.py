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
    LayerSpec,
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
    is one piece of memory, and so are a head's vectors in it. What a decode launches depends on
    the batch size alone, and `plan` keeps nothing of a batch of decodes but its tensors, as CUDA
    graphs need.
    """

    # Only on request: so far the kernels have run in an emulator, and on no GPU.
    auto_rank = 0

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
        if spec.quantizer is not None:
            return "stores the model's dtype only; torch_paged runs every KV quantizer"
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
                spec.dtype, layer.head_size, layer.num_heads // layer.num_kv_heads, spec.block_size
            )
            for layer in spec.layers
        ]
        loaded = {instance: self.load(instance) for instance in dict.fromkeys(self.instances)}
        self.kernels = [loaded[instance] for instance in self.instances]
        self.cache: list[torch.Tensor] = []
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
        return sum(map(self._block_bytes, self.spec.layers))

    def allocate(self, num_blocks: int) -> None:
        self.cache = [
            torch.empty(
                (num_blocks, 2, s.num_kv_heads, self.spec.block_size, s.head_size),
                dtype=self.spec.dtype,
                device=self.spec.device,
            )
            for s in self.spec.layers
        ]

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
        for kernels, cache, spec in zip(self.kernels, self.cache, self.spec.layers, strict=True):
            words = self._block_bytes(spec) // 16
            blocks = min(-(-words // THREADS), 32)
            # The grid's second side is limited.
            for some in given.split(65535):
                params = CopyParams(cache.data_ptr(), some.data_ptr(), words)
                kernels.launch("copy", (blocks, len(some), 1), THREADS, params)

    def read_blocks(self, blocks: Sequence[int]) -> torch.Tensor:
        index = torch.tensor(blocks, dtype=torch.int64, device=self.spec.device)
        parts = [cache.view(torch.uint8).flatten(1)[index] for cache in self.cache]
        return torch.cat(parts, dim=1).cpu()

    def write_blocks(self, blocks: Sequence[int], data: torch.Tensor) -> None:
        index = torch.tensor(blocks, dtype=torch.int64, device=self.spec.device)
        sizes = [self._block_bytes(layer) for layer in self.spec.layers]
        parts = data.to(self.spec.device).split(sizes, dim=1)
        for cache, part in zip(self.cache, parts, strict=True):
            cache.view(torch.uint8).flatten(1)[index] = part

    def _store(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        spec, batch = self.spec.layers[layer], self._batch
        params = StoreParams(
            k=k.data_ptr(),
            v=v.data_ptr(),
            cache=self.cache[layer].data_ptr(),
            slots=batch.slots.data_ptr(),
            k_stride=k.stride(0),
            v_stride=v.stride(0),
            num_tokens=batch.num_tokens,
            num_kv_heads=spec.num_kv_heads,
        )
        vectors = 2 * batch.num_tokens * spec.num_kv_heads * spec.head_size * k.itemsize // 16
        self.kernels[layer].launch("store", (-(-vectors // THREADS), 1, 1), THREADS, params)

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
            scale=spec.scale,
            softcap=spec.softcap or 0.0,
        )

    def _block_bytes(self, layer: LayerSpec) -> int:
        vectors = 2 * layer.num_kv_heads * self.spec.block_size
        return vectors * layer.head_size * self.spec.dtype.itemsize


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


def _is_aligned(x: torch.Tensor) -> bool:
    """Whether each row begins at a multiple of 16 bytes, as the kernels' loads need it."""
    return x.data_ptr() % 16 == 0 and x.stride(0) * x.itemsize % 16 == 0


def _aligned(x: torch.Tensor) -> torch.Tensor:
    return x if _is_aligned(x) else x.clone(memory_format=torch.contiguous_format)
