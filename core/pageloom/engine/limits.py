"""The limits of steps that a configuration sets."""

from __future__ import annotations

from typing import cast

from pageloom.config import Config
from pageloom.scheduling import Limits, PreemptionMode


def limits_of(config: Config, *, block_size: int, max_model_len: int) -> Limits:
    """With what the attention backend and the model say of themselves, in tokens."""
    scheduler = config.scheduler
    return Limits(
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_model_len=max_model_len,
        block_size=block_size,
        enable_chunked_prefill=scheduler.enable_chunked_prefill,
        enable_prefix_caching=config.kv_cache.enable_prefix_caching,
        preemption_mode=cast("PreemptionMode", scheduler.preemption_mode),
    )
