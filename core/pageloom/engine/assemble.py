"""From a configuration to an engine: pick the parts and put them together."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import cast

import torch

from pageloom.config import Config, build_options
from pageloom.contract import AttentionBackend, AttentionSpec, EngineInfo, KVQuantizer, Scheduler
from pageloom.contract.quantizer import Kind
from pageloom.engine.backend_choice import choose_backend
from pageloom.engine.capacity import count_blocks, count_host_blocks
from pageloom.engine.device import find_device
from pageloom.engine.engine import Engine
from pageloom.engine.load_model import LoadedModel, load_model
from pageloom.engine.memory_report import MemoryReport, weight_bytes
from pageloom.engine.prompts import PromptEncoder
from pageloom.errors import PageloomError, one_line
from pageloom.memory import BlockPool
from pageloom.plugins import Plugins, blame
from pageloom.runner.graphs import capture_decodes
from pageloom.runner.runner import ModelRunner
from pageloom.runner.sampler import Sampler
from pageloom.scheduling import Limits, Planner, PreemptionMode

log = logging.getLogger(__name__)


def assemble(config: Config, plugins: Plugins) -> Engine:
    """Build the engine that ``config`` describes from components of ``plugins``, which checked it.

    Raises `PageloomError` for what cannot be built.
    """
    device = find_device(config.runtime.device, "runtime.device")
    if config.runtime.num_threads:
        torch.set_num_threads(config.runtime.num_threads)
    loaded = load_model(config, plugins, device)
    model, max_model_len = loaded.model, loaded.max_model_len
    quantizer = _quantizer(config, plugins, loaded)
    name, backend = choose_backend(
        config,
        plugins,
        AttentionSpec(
            device,
            loaded.dtype,
            model.layers,
            0,
            max_model_len,
            quantizer=config.kv_cache.quantizer,
            layout=quantizer.layout if quantizer else None,
        ),
        quantizer,
    )
    block_size = backend.spec.block_size
    with blame("attention_backend", name):
        bytes_per_block = backend.bytes_per_block()
    capacity = count_blocks(
        config,
        model,
        bytes_per_block=bytes_per_block,
        block_size=block_size,
        max_model_len=max_model_len,
        device=device,
    )
    host_blocks = count_host_blocks(
        config, bytes_per_block=bytes_per_block, block_size=block_size, max_model_len=max_model_len
    )
    _allocate(name, backend, capacity.num_blocks, bytes_per_block)
    info = EngineInfo(
        model=config.model.path,
        architecture=loaded.architecture,
        device=str(device),
        dtype=str(loaded.dtype).removeprefix("torch."),
        policy=config.scheduler.policy,
        backend=name,
        quantizer=config.kv_cache.quantizer,
        block_size=block_size,
        num_blocks=capacity.num_blocks,
        bytes_per_block=bytes_per_block,
        max_model_len=max_model_len,
    )
    memory = MemoryReport(
        device=info.device,
        weights=weight_bytes(model.weights()),
        kv_format=info.quantizer or info.dtype,
        block_size=info.block_size,
        num_blocks=info.num_blocks,
        bytes_per_block=bytes_per_block,
        max_model_len=max_model_len,
        host_blocks=host_blocks,
        activations=capacity.activations,
    )
    for line in memory.lines():
        log.info(line)
    return Engine(
        _planner(config, plugins, info, host_blocks),
        _runner(config, loaded, backend, host_blocks),
        PromptEncoder(loaded.tokenizer, model.vocab_size, max_model_len),
        plugins,
        info,
        memory,
        eos_token_ids=loaded.eos_token_ids,
        debug=config.runtime.debug,
    )


def _allocate(name: str, backend: AttentionBackend, num_blocks: int, bytes_per_block: int) -> None:
    try:
        backend.allocate(num_blocks)
    except (RuntimeError, MemoryError) as error:
        raise PageloomError(
            f"{name} cannot allocate a KV cache of {num_blocks} blocks, which is "
            f"{num_blocks * bytes_per_block:,} bytes: {one_line(error)}; lower kv_cache.memory or "
            "kv_cache.num_blocks"
        ) from error


def _planner(config: Config, plugins: Plugins, info: EngineInfo, host_blocks: int) -> Planner:
    return Planner(
        _scheduler(config, plugins),
        BlockPool(info.num_blocks),
        Limits(
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
            max_model_len=info.max_model_len,
            block_size=info.block_size,
            enable_chunked_prefill=config.scheduler.enable_chunked_prefill,
            enable_prefix_caching=config.kv_cache.enable_prefix_caching,
            preemption_mode=cast("PreemptionMode", config.scheduler.preemption_mode),
        ),
        policy=config.scheduler.policy,
        host=BlockPool(host_blocks) if host_blocks else None,
    )


def _runner(
    config: Config, loaded: LoadedModel, backend: AttentionBackend, host_blocks: int
) -> ModelRunner:
    graphs = None
    if not config.runtime.enforce_eager:
        limits = config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens
        graphs = capture_decodes(loaded.model, backend, min(limits))
    sampler = Sampler(config.runtime.seed)
    return ModelRunner(loaded.model, backend, sampler, backend.spec.device, host_blocks, graphs)


def _scheduler(config: Config, plugins: Plugins) -> Scheduler:
    policy: type[Scheduler] = plugins.get("scheduler", config.scheduler.policy)
    options = build_options(policy, config.scheduler.options)
    with blame("scheduler", config.scheduler.policy):
        return policy(options)


def _quantizer(config: Config, plugins: Plugins, loaded: LoadedModel) -> KVQuantizer | None:
    name = config.kv_cache.quantizer
    if name is None:
        return None
    chosen: type[KVQuantizer] = plugins.get("kv_quantizer", name)
    options = build_options(chosen, config.kv_cache.options)
    scales = _kv_scales(config, loaded, chosen)
    with blame("kv_quantizer", name):
        quantizer = chosen(options)
        try:
            for size in sorted({layer.head_size for layer in loaded.model.layers}):
                quantizer.bytes_per_vector(size)
            quantizer.set_scales(len(loaded.model.layers), scales)
        except ValueError as error:
            raise PageloomError(f"kv_cache.quantizer {name}: {error}") from error
        return quantizer


def _kv_scales(
    config: Config, loaded: LoadedModel, quantizer: type[KVQuantizer]
) -> Mapping[tuple[int, Kind], float]:
    """Those of the checkpoint, unless every vector carries its own: then they may be anything."""
    if quantizer.layout is not None and quantizer.layout.scaling != "static":
        return {}
    try:
        return loaded.loader.kv_scales()
    except (ValueError, OSError) as error:
        raise PageloomError(f"model {config.model.path}: {error}") from error
