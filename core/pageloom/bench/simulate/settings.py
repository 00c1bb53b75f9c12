"""What a simulation takes from a configuration and a profile."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pageloom.bench.simulate.load import Load
from pageloom.config import Config
from pageloom.config.schema import KVCacheConfig
from pageloom.contract import WorkerReport
from pageloom.contract.costs import StepCosts, StepProfile
from pageloom.engine.limits import limits_of
from pageloom.engine.policy import Policy
from pageloom.errors import PageloomError
from pageloom.memory import blocks_for
from pageloom.scheduling import Limits

EXECUTOR = "simulated"  # by whose options a configuration names its profile


@dataclass(frozen=True)
class Settings:
    """One engine of a simulation. Goes to other processes as it is."""

    name: str
    policy: Policy
    limits: Limits
    num_blocks: int
    host_blocks: int
    max_waiting: int | None  # requests; more are refused, as by a server
    costs: StepCosts

    def check(self, load: Load) -> None:
        """Raise `PageloomError` unless every request can be served."""
        limits, prompts = self.limits, load.prompt_tokens
        computed = prompts + load.rows["output_tokens"] - 1
        longest = limits.max_model_len - 1
        if not limits.enable_chunked_prefill:
            longest = min(longest, limits.max_num_batched_tokens)
        longest = min(longest, self.num_blocks * limits.block_size)
        number = int(np.argmax(computed))
        if computed[number] > longest:
            raise PageloomError(
                f"{self.name} cannot serve request {number + 1}, of {prompts[number]:,} prompt and "
                f"{load.rows['output_tokens'][number]:,} output tokens: it may have "
                f"{longest + 1:,} together, by the least of model.max_model_len "
                f"({limits.max_model_len:,}), the KV cache ({self.num_blocks:,} blocks of "
                f"{limits.block_size}) and, without chunked prefills, max_num_batched_tokens"
            )


def profile_of(config: Config, given: str | None) -> StepProfile:
    """From the file that was given, or else the one that the configuration names."""
    path = given
    if path is None and config.parallel.executor == EXECUTOR:
        path = config.parallel.options.get("profile")
    if path is None:
        raise PageloomError(
            "how long steps take is not known: give --profile FILE, or parallel: {executor: "
            "simulated, options: {profile: FILE}}; pageloom bench profile CONFIG --out FILE "
            "makes one"
        )
    try:
        return StepProfile.read(path)
    except ValueError as error:
        raise PageloomError(str(error)) from error


def settings_from(config: Config, profile: StepProfile, name: str) -> Settings:
    """The engine that a configuration from `load_config` makes, on the profile's machine.

    Raises `PageloomError` where the profile says nothing of such an engine, or no block fits.
    """
    try:
        profile.check_quantizer(config.kv_cache.quantizer)
    except ValueError as error:
        raise PageloomError(f"{name}: {error}") from error
    cache = config.kv_cache
    worker = profile.worker.in_blocks_of(cache.block_size or profile.worker.block_size)
    longest = config.model.max_model_len or worker.max_model_len
    most = config.scheduler.max_num_seqs * blocks_for(longest, worker.block_size)
    num_blocks = _num_blocks(cache, worker, most)
    if num_blocks < 1:
        raise PageloomError(
            f"{name}: no KV block of {worker.bytes_per_block:,} bytes fits; raise kv_cache.memory "
            "or lower kv_cache.block_size"
        )
    return Settings(
        name,
        Policy.of(config),
        limits_of(config, block_size=worker.block_size, max_model_len=longest),
        num_blocks,
        min(cache.swap_bytes // max(1, worker.bytes_per_block), most),
        config.server.max_waiting,
        profile.costs,
    )


def _num_blocks(cache: KVCacheConfig, worker: WorkerReport, most: int) -> int:
    """As many as the configuration says, or as the profile's machine has; 0 if none fits. ``most``
    are of use without prefix caching."""
    if cache.num_blocks is not None:
        return cache.num_blocks
    if cache.memory_bytes is None:
        return worker.num_blocks
    if not worker.bytes_per_block:
        raise PageloomError(
            f"kv_cache.memory is {cache.memory}, but the profile does not say how many bytes a "
            "block takes; set kv_cache.num_blocks instead"
        )
    fitting = cache.memory_bytes // worker.bytes_per_block
    return fitting if cache.enable_prefix_caching else min(fitting, most)
