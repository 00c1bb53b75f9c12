"""How many KV blocks the engine gets."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from pageloom.config import Config
from pageloom.errors import PageloomError
from pageloom.memory import blocks_for
from pageloom.models.model import Attend, Model

# A laptop keeps most of its memory for what else runs on it.
CPU_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Capacity:
    num_blocks: int
    activations: int | None
    """Most bytes that a step takes beside weights and cache, if they had to be left room for."""


def count_blocks(
    config: Config,
    model: Model,
    *,
    bytes_per_block: int,
    block_size: int,
    max_model_len: int,
    device: torch.device,
) -> Capacity:
    """Blocks for ``kv_cache``: as many as its ``num_blocks`` says, or as fit into its
    ``memory``, or else into what the device has left.

    More than ``max_num_seqs`` requests of ``max_model_len`` could use are of use to prefix caching
    only; without it, and on a CPU if no size is given, they are left out.

    Raises `PageloomError` if not a single block fits.
    """
    cache, seats = config.kv_cache, config.scheduler.max_num_seqs
    total = _physical_memory(device)
    if cache.num_blocks is not None:
        _check_fits(cache.num_blocks * bytes_per_block, total, "kv_cache.num_blocks")
        return Capacity(cache.num_blocks, None)
    activations, remedy = None, "raise kv_cache.memory or lower kv_cache.block_size"
    if cache.memory_bytes is not None:
        budget, source = cache.memory_bytes, "kv_cache.memory"
    elif device.type == "cuda":
        budget, activations = _cuda_budget(config, model, device)
        source = "kv_cache.gpu_memory_utilization (after weights and activations)"
        remedy = "raise it, or lower scheduler.max_num_batched_tokens"
    else:
        # All ranks of all engines share the machine, if they are not on Ray.
        ranks = config.parallel.world_size * config.parallel.most_replicas
        budget, source = int(total * CPU_SHARE / ranks), f"{CPU_SHARE:.0%} of this machine's memory"
    _check_fits(budget, total, "kv_cache.memory")
    num_blocks = budget // bytes_per_block
    if not cache.enable_prefix_caching or (cache.memory is None and device.type == "cpu"):
        num_blocks = min(num_blocks, seats * blocks_for(max_model_len, block_size))
    if num_blocks < 1:
        raise PageloomError(
            f"no KV block fits: {source} leaves {max(0, budget):,} bytes, a block of {block_size} "
            f"tokens takes {bytes_per_block:,}; {remedy}"
        )
    return Capacity(num_blocks, activations)


def count_host_blocks(
    config: Config, *, bytes_per_block: int, block_size: int, max_model_len: int
) -> int:
    """Blocks that fit into ``kv_cache.swap_space``, but no more than ``max_num_seqs`` requests of
    ``max_model_len`` could use. Raises `PageloomError` if it is more than the machine has."""
    host = _physical_memory(torch.device("cpu"))
    _check_fits(config.kv_cache.swap_bytes, host, "kv_cache.swap_space")
    most = config.scheduler.max_num_seqs * blocks_for(max_model_len, block_size)
    return min(config.kv_cache.swap_bytes // bytes_per_block, most)


def _physical_memory(device: torch.device) -> int:
    """Bytes that the device has: of a CPU, what this process may use of the machine's memory."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")  # of a container
    if limit.is_file() and (text := limit.read_text().strip()).isdigit():
        total = min(total, int(text))
    return total


def _check_fits(wanted: int, total: int, key: str) -> None:
    if wanted > total:
        raise PageloomError(
            f"{key} asks for {wanted / 2**30:,.1f} GiB of KV cache, but there are "
            f"{total / 2**30:,.1f} GiB in all; lower it"
        )


@torch.inference_mode()
def _cuda_budget(config: Config, model: Model, device: torch.device) -> tuple[int, int]:
    """Bytes for the cache, which are the configured share of the card less what is in use once the
    largest step has run without a cache; and the bytes that this step took."""
    torch.cuda.reset_peak_memory_stats(device)
    allocated = torch.cuda.memory_allocated(device)
    tokens = torch.zeros(config.scheduler.max_num_batched_tokens, dtype=torch.long, device=device)

    def no_attention(
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> None:
        out.zero_()

    hidden = model.forward(tokens, torch.zeros_like(tokens), Attend(no_attention))
    if model.group.rank.is_last:  # the head is there
        model.logits(hidden[: config.scheduler.max_num_seqs])
    torch.cuda.synchronize(device)
    activations = torch.cuda.max_memory_allocated(device) - allocated
    del hidden
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    in_use = total - free
    budget = int(total * config.kv_cache.gpu_memory_utilization) - in_use - activations
    return budget, activations
