"""Where an engine's memory went."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import nn

from pageloom.errors import counted
from pageloom.memory import blocks_for


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """What an engine set aside when it started. Sizes are in bytes."""

    device: str
    weights: Mapping[str, int]  # by format, the largest first; see `weight_bytes`
    kv_format: str  # the quantizer's name, or the dtype
    block_size: int  # tokens
    num_blocks: int
    bytes_per_block: int  # all layers, K and V
    max_model_len: int  # tokens
    host_blocks: int  # room for blocks that are swapped out; taken only as they are written
    activations: int | None
    """Most that a step takes beside the weights and the cache; None where nobody had to know."""

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * self.bytes_per_block

    @property
    def kv_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def kv_bytes_per_token(self) -> float:
        return self.bytes_per_block / self.block_size

    @property
    def longest_requests(self) -> int:
        """How many requests of ``max_model_len`` fit into the cache at the same time."""
        return self.num_blocks // blocks_for(self.max_model_len, self.block_size)

    @property
    def host_bytes(self) -> int:
        return self.host_blocks * self.bytes_per_block

    def lines(self) -> Iterator[str]:
        """The report for people, a few lines."""
        formats = ", ".join(f"{name} {show_bytes(size)}" for name, size in self.weights.items())
        yield (
            f"memory of {self.device}: weights {show_bytes(sum(self.weights.values()))}"
            + (f" ({formats})" if formats else "")
        )
        if self.activations is not None:
            yield f"  activations: {show_bytes(self.activations)} in the largest step"
        yield (
            f"  KV cache: {show_bytes(self.kv_bytes)} of {self.kv_format}, "
            f"{show_bytes(self.kv_bytes_per_token)} per token; "
            f"{counted(self.num_blocks, 'block')} of {counted(self.block_size, 'token')}, room for "
            f"{self.kv_tokens:,}, which is {counted(self.longest_requests, 'request')} of "
            f"max_model_len {self.max_model_len:,}"
        )
        if self.host_blocks:
            yield (
                f"  host memory for swapped blocks: {show_bytes(self.host_bytes)} at most, "
                f"{counted(self.host_blocks, 'block')}"
            )


def weight_bytes(parts: Iterable[nn.Module | torch.Tensor]) -> dict[str, int]:
    """Bytes of weights by format, the largest first; what several parts share counts once.

    A format is what a module, or one that it is part of, says in ``weight_format`` (see
    `WeightLoader.linear`), and otherwise a tensor's dtype. Of a module all tensors count that are
    its parameters, buffers or attributes, or lie in a list, tuple, dictionary or dataclass there.
    """
    seen: set[Any] = set()
    sizes: dict[str, int] = {}
    for part in parts:
        found = _in_module(part, None) if isinstance(part, nn.Module) else [(None, part)]
        for name, tensor in found:
            key = _memory_of(tensor)
            if tensor.is_meta or not tensor.nbytes or key in seen:
                continue
            seen.add(key)
            name = name or str(tensor.dtype).removeprefix("torch.")
            sizes[name] = sizes.get(name, 0) + tensor.nbytes
    return dict(sorted(sizes.items(), key=lambda entry: -entry[1]))


def _in_module(
    module: nn.Module, inherited: str | None
) -> Iterator[tuple[str | None, torch.Tensor]]:
    """Its tensors, each with the format that a module says."""
    said = getattr(module, "weight_format", inherited)
    for value in vars(module).values():  # where torch keeps parameters and buffers too
        for tensor in _tensors(value):
            yield said, tensor
    for child in module.children():
        yield from _in_module(child, said)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif is_dataclass(value) and not isinstance(value, type):
        yield from _tensors([getattr(value, field.name) for field in fields(value)])


def _memory_of(tensor: torch.Tensor) -> Any:
    """Equal for tensors in the same place."""
    if tensor.layout is torch.strided:
        return tensor.device, tensor.data_ptr(), tensor.nbytes
    return id(tensor)  # such as weights that oneDNN has packed, whose address is not told


def show_bytes(size: float) -> str:
    """A size with the unit that suits it, such as ``22.5 KiB``."""
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:,.{0 if unit == 'bytes' else 1}f} {unit}"
        size /= 1024
    return f"{size:,.1f} GiB"
