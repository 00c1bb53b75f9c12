"""What the bench takes from an engine's configuration: how steps are planned."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

from pageloom.bench.memory.served import KV_SLOTS, OPT_13B
from pageloom.config import Config
from pageloom.engine.policy import Policy
from pageloom.scheduling import PreemptionMode

BLOCK_SIZE = 16  # the paper's, and the default here


@dataclass(frozen=True, slots=True)
class Settings:
    policy: Policy
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_chunked_prefill: bool
    block_size: int  # tokens
    preemption_mode: PreemptionMode
    swap_bytes: int
    seed: int

    @property
    def num_blocks(self) -> int:
        return KV_SLOTS // self.block_size

    @property
    def host_blocks(self) -> int:
        return self.swap_bytes // (self.block_size * OPT_13B.kv_bytes_per_token)

    def with_block_size(self, block_size: int) -> Settings:
        return replace(self, block_size=block_size)


def settings_from(config: Config) -> Settings:
    """The settings that a configuration from `load_config` makes."""
    scheduler = config.scheduler
    return Settings(
        Policy.of(config),
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        enable_chunked_prefill=scheduler.enable_chunked_prefill,
        block_size=config.kv_cache.block_size or BLOCK_SIZE,
        preemption_mode=cast("PreemptionMode", scheduler.preemption_mode),
        swap_bytes=config.kv_cache.swap_bytes,
        seed=config.runtime.seed,
    )
