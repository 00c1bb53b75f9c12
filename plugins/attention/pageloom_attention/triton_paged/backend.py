"""The backend: what is launched, and with what."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pageloom.contract import AttentionBatch, AttentionSpec, KVQuantizer, LayerSpec
from pageloom_attention.cache import CachedAttention
from pageloom_attention.triton_paged.tiles import SCALE_BYTES, Chip, Tiles, choose
from pageloom_attention.triton_paged.work import divide

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_HEAD_SIZE = 512
MAX_FLOAT32_HEAD_SIZE = 128  # on NVIDIA, whose registers hold no more in parts
INTERPRETER = Chip("interpreter", processors=4)


@dataclass(frozen=True, slots=True)
class Launch:
    """One step's work in layers of one shape, where the kernels read it."""

    tiles: Tiles
    items: torch.Tensor  # int32 [n * 8], as `Work.items`
    merges: torch.Tensor  # int32 [m * 4], as `Work.merges`
    merge_rows: int  # rows that a merged tile has at most


class TritonPaged(CachedAttention):
    """One kernel attends for prefills, decodes and mixes of them, where K and V lie.

    A step in which every sequence has one query token launches the same grids, on the same
    buffers, whenever it has the same number of sequences, so CUDA graphs of such steps stay valid
    as contexts grow: call `plan`, then replay.

    KV formats that have a `VectorLayout` are read and written as they are. A vector's scale lies
    behind all codes of its KV head's part of a block, where it does not bring codes out of line.

    How a sequence's tokens are split depends on what else is in the step, and the order of its
    sums with it: results agree with those of other steps to rounding.
    """

    # Before torch_paged on a GPU. Interpreted on a CPU it must not come before cpu_paged.
    auto_rank = 15
    supports_cuda_graphs = True
    fuses_rotary = True

    @classmethod
    def check(cls, spec: AttentionSpec) -> str | None:
        if importlib.util.find_spec("triton") is None:
            return "needs the package triton"
        refused = _check_format(spec)
        if refused is not None:
            return refused
        if spec.dtype not in DTYPES:
            return f"computes in float32, bfloat16 and float16, not {spec.dtype}"
        largest = max(layer.head_size for layer in spec.layers)
        if largest > MAX_HEAD_SIZE:
            return f"supports head sizes up to {MAX_HEAD_SIZE}, not {largest}"
        if spec.device.type == "cpu":
            # Not asked of triton, whose import takes a second.
            if os.environ.get("TRITON_INTERPRET") != "1":
                return "needs a GPU, or TRITON_INTERPRET=1 to be interpreted on a CPU"
            return None
        if spec.device.type != "cuda":
            return f"runs on NVIDIA and AMD GPUs, not on {spec.device}"
        return _check_gpu(spec, largest)

    def __init__(self, config: Any, spec: AttentionSpec, quantizer: KVQuantizer | None) -> None:
        super().__init__(config, spec, quantizer)
        from pageloom_attention.triton_paged import kernels, launch

        self._kernels, self._launch = kernels, launch
        on_gpu = spec.device.type == "cuda"
        self._chip = _chip(spec.device) if on_gpu else INTERPRETER
        self._products = spec.dtype if on_gpu else torch.float32
        self._inverses, self._scales = self._fold_scales()
        self._partials, self._stats = self._allocate_partials()
        self._decode_work: dict[tuple[LayerSpec, int], torch.Tensor] = {}
        self._launches: dict[LayerSpec, Launch] = {}

    def plan(self, batch: AttentionBatch) -> None:
        self._batch = batch
        self._launches = {}
        starts, lengths = (
            x.numpy().astype(np.int64) for x in (batch.query_start_host, batch.seq_lens_host)
        )
        for layer in self.spec.layers:
            if layer not in self._launches:
                self._launches[layer] = self._plan_layers(batch, starts, lengths, layer)

    def forward(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
        rotary: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        with self._on_device():
            if rotary is None:
                self.store(layer, k, v)
            else:
                self.store(layer, k, v, q, *rotary)
            self._attend(layer, q, out, sinks)

    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor, *turned: torch.Tensor) -> None:
        """``turned``, if given, is q, which is rotated in place as k is on its way, cos and sin."""
        spec, (keys, values) = self.spec.layers[layer], self._halves[layer]
        constants = self._launch.store(
            spec, self.spec.block_size, self.spec.dtype, self._chip.family, self.spec.layout
        )
        programs = -(-len(k) * spec.num_kv_heads // constants["VECTORS"])
        rotary: tuple[Any, ...] = (None, None, None, None)
        if turned:
            q, cos, sin = turned
            programs += -(-len(k) * spec.num_heads // constants["VECTORS"])
            rotary = (q, q.stride(0), cos, sin)
        self._kernels.store_kernel[programs,](
            k,
            v,
            keys,
            values,
            self._batch.slots,
            len(k),
            k.stride(0),
            v.stride(0),
            *self._inverses[layer],
            *rotary,
            **constants,
        )

    def _attend(
        self, layer: int, q: torch.Tensor, out: torch.Tensor, sinks: torch.Tensor | None
    ) -> None:
        spec, (keys, values) = self.spec.layers[layer], self._halves[layer]
        work, kernels, heads = self._launches[spec], self._kernels, spec.num_kv_heads
        kernels.attend_kernel[len(work.items) // 8, heads](
            out,
            self._partials,
            self._stats,
            q,
            keys,
            values,
            work.items,
            self._batch.block_tables,
            sinks,
            q.stride(0),
            out.stride(0),
            self._batch.block_tables.stride(0),
            *self._scales[layer],
            **self._launch.attend(
                spec,
                self.spec.block_size,
                self._products,
                self._chip.family,
                self.spec.layout,
                work.tiles,
            ),
        )
        if len(work.merges):
            kernels.merge_kernel[len(work.merges) // 4, heads, work.merge_rows](
                out,
                self._partials,
                self._stats,
                work.merges,
                out.stride(0),
                **self._launch.merge(spec, work.tiles),
            )

    def _plan_layers(
        self,
        batch: AttentionBatch,
        starts: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
        layer: LayerSpec,
    ) -> Launch:
        decode = batch.max_query_len == 1
        group = layer.num_heads // layer.num_kv_heads
        tiles = self._tiles(layer, decode)
        programs = self._programs(layer)
        work = divide(starts, lengths, group, layer.window, tiles, programs)
        key = None
        if decode:
            work = work.padded(batch.num_seqs * -(-group // tiles.rows), programs)
            key = (layer, batch.num_seqs)
        data = self._to_device(np.concatenate([work.items.ravel(), work.merges.ravel()]), key)
        items, merges = data.split([work.items.size, work.merges.size])
        return Launch(tiles, items, merges, min(tiles.rows, batch.max_query_len * group))

    def _to_device(
        self, data: npt.NDArray[np.int32], key: tuple[LayerSpec, int] | None
    ) -> torch.Tensor:
        """``data`` where the kernels find it, always in the same place for the same ``key``."""
        host = torch.from_numpy(data)
        if self.spec.device.type == "cuda":
            host = host.pin_memory()  # else the copy would wait for the GPU
        if key is None:
            return host.to(self.spec.device, non_blocking=True)
        if key not in self._decode_work:
            self._decode_work[key] = torch.empty_like(host, device=self.spec.device)
        return self._decode_work[key].copy_(host, non_blocking=True)

    def _tiles(self, layer: LayerSpec, decode: bool) -> Tiles:
        group = layer.num_heads // layer.num_kv_heads
        itemsize = self.spec.dtype.itemsize
        coded = self.quantizer is not None
        return choose(self._chip.family, layer.head_size, itemsize, group, decode, coded)

    def _programs(self, layer: LayerSpec) -> int:
        """How many programs per KV head fill the chip."""
        return max(self._chip.programs // layer.num_kv_heads, 1)

    def _fold_scales(self) -> tuple[list[Any], list[Any]]:
        """What each layer's kernels are given of its scales: `launch.inverses`, `launch.scales`."""
        layout, products = self.spec.layout, self._products
        if self.quantizer is None or layout is None or layout.scaling != "static":
            each = [self._launch.scales(layer, products, layout) for layer in self.spec.layers]
            return [(None, None)] * len(each), each
        constant = self.quantizer.static_scale
        both = [(constant(i, "k"), constant(i, "v")) for i in range(len(self.spec.layers))]
        return [self._launch.inverses(*scales) for scales in both], [
            self._launch.scales(layer, products, layout, *scales)
            for layer, scales in zip(self.spec.layers, both, strict=True)
        ]

    def _allocate_partials(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Room for the partial results of any layer in any step, and for two numbers of each."""
        vectors = elements = 0
        for layer in self.spec.layers:
            rows = max(self._tiles(layer, decode).rows for decode in (True, False))
            most = 2 * self._programs(layer) * layer.num_kv_heads * rows
            vectors, elements = max(vectors, most), max(elements, most * layer.head_size)
        options: dict[str, Any] = {"dtype": torch.float32, "device": self.spec.device}
        return torch.empty(elements, **options), torch.empty(vectors * 2, **options)

    def _on_device(self) -> contextlib.AbstractContextManager[object]:
        """Triton launches on the current device."""
        if self.spec.device.type == "cuda":
            return torch.cuda.device(self.spec.device)
        return contextlib.nullcontext()


def _check_format(spec: AttentionSpec) -> str | None:
    if spec.quantizer is None:
        return None
    if spec.layout is None:
        return (
            f"reads KV formats whose bytes follow a VectorLayout, which those of {spec.quantizer} "
            "do not; torch_paged runs every KV format"
        )
    for layer in spec.layers:
        try:
            width = spec.layout.bytes_per_vector(layer.head_size)
        except ValueError as error:
            return f"cannot store {spec.quantizer}: {error}"
        if spec.layout.scaling == "token_head" and spec.block_size * width % SCALE_BYTES:
            return (
                f"reads {spec.quantizer} with head size {layer.head_size} in blocks of a multiple "
                f"of {SCALE_BYTES} tokens, not of {spec.block_size}"
            )
    return None


def _check_gpu(spec: AttentionSpec, largest_head: int) -> str | None:
    if torch.version.hip is not None:
        return None
    capability = torch.cuda.get_device_capability(spec.device)
    if capability < (8, 0):
        return "needs compute capability 8.0, {}.{} is too old".format(*capability)
    if spec.dtype is torch.float32 and largest_head > MAX_FLOAT32_HEAD_SIZE:
        return f"computes in float32 up to head size {MAX_FLOAT32_HEAD_SIZE}, not {largest_head}"
    return None


def _chip(device: torch.device) -> Chip:
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    if torch.version.hip is not None:
        return Chip("amd", processors)
    major, _ = torch.cuda.get_device_capability(device)
    return Chip("hopper" if major in (9, 10) else "ampere", processors)
