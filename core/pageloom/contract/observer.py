"""What observers are told. All values are plain and immutable; keep them as long as you like.

Times are seconds on the clock of `time.monotonic`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineInfo:
    model: str
    architecture: str
    device: str
    dtype: str
    policy: str
    backend: str
    quantizer: str | None
    block_size: int  # tokens
    num_blocks: int
    bytes_per_block: int  # all layers, K and V
    max_model_len: int  # tokens


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One engine step."""

    step: int
    started: float
    finished: float
    num_running: int  # requests holding a seat while the step ran
    num_waiting: int
    prefill_tokens: int  # prompt (and recomputed) tokens computed in this step
    decode_tokens: int
    recomputed_tokens: int  # part of prefill_tokens that was computed before a preemption
    preempted: int  # requests preempted in this step
    blocks_copied: int  # for writes to shared blocks (copy-on-write)
    blocks_swapped_out: int
    blocks_swapped_in: int
    blocks_used: int  # while the step ran: those that finished in it are still counted
    blocks_cached: int  # free, but with a prefix that can be reused
    blocks_total: int
    kv_tokens: int  # token states held in the used blocks; shared ones count once
    kv_slots: int  # token states that the used blocks have room for


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One finished request."""

    request_id: str
    user: str
    finish_reason: str  # "stop", "length", "abort" or "error"
    prompt_tokens: int
    cached_tokens: int  # prompt tokens served from the prefix cache
    output_tokens: int
    preemptions: int
    arrived: float
    first_scheduled: float | None
    first_token: float | None
    finished: float
