"""From a configuration to an engine: pick the parts and put them together."""

from __future__ import annotations

from typing import cast

import torch
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from pageloom.config import Config, build_options
from pageloom.contract import AttentionSpec, EngineInfo, KVQuantizer, Scheduler, WeightLoader
from pageloom.engine.backend_choice import choose_backend
from pageloom.engine.capacity import count_blocks, count_host_blocks
from pageloom.engine.device import find_device
from pageloom.engine.engine import Engine
from pageloom.engine.prompts import PromptEncoder
from pageloom.errors import PageloomError, one_line
from pageloom.memory import BlockPool
from pageloom.models.build import build_model
from pageloom.models.loading import open_loader
from pageloom.models.model import Model
from pageloom.plugins import Plugins, blame
from pageloom.runner.runner import ModelRunner
from pageloom.runner.sampler import Sampler
from pageloom.scheduling import Limits, Planner, PreemptionMode


def assemble(config: Config, plugins: Plugins) -> Engine:
    """Build the engine that ``config`` describes from components of ``plugins``, which checked it.

    Raises `PageloomError` for what cannot be built.
    """
    device = find_device(config.runtime.device, "runtime.device")
    if config.runtime.num_threads:
        torch.set_num_threads(config.runtime.num_threads)

    try:
        loader = open_loader(
            plugins,
            config.model.path,
            config.model.loader,
            config.model.options,
            config.model.trust_remote_code,
        )
        model_config = loader.model_config()
        tokenizer = _tokenizer(config.model.tokenizer, loader)
        dtype = _dtype(config.model.dtype, model_config)
        max_model_len = _max_model_len(config.model.max_model_len, model_config)
        model = build_model(
            loader,
            model_config,
            dtype=dtype,
            device=device,
            max_model_len=max_model_len,
            trust_remote_code=config.model.trust_remote_code,
        )
    except (ValueError, OSError) as error:
        raise PageloomError(f"model {config.model.path}: {error}") from error
    quantizer = _quantizer(config, plugins, loader, model)
    name, chosen, spec = choose_backend(
        config,
        plugins,
        AttentionSpec(
            device,
            dtype,
            model.layers,
            0,
            max_model_len,
            quantizer=config.kv_cache.quantizer,
            layout=quantizer.layout if quantizer else None,
        ),
    )
    options = build_options(chosen, config.attention.options)
    with blame("attention_backend", name):
        backend = chosen(options, spec, quantizer)
        bytes_per_block = backend.bytes_per_block()
    num_blocks = count_blocks(
        config,
        model,
        bytes_per_block=bytes_per_block,
        block_size=spec.block_size,
        max_model_len=max_model_len,
        device=device,
    )
    try:
        backend.allocate(num_blocks)
    except (RuntimeError, MemoryError) as error:
        raise PageloomError(
            f"{name} cannot allocate a KV cache of {num_blocks} blocks, which is "
            f"{num_blocks * bytes_per_block:,} bytes: {one_line(error)}; lower kv_cache.memory or "
            "kv_cache.num_blocks"
        ) from error
    host_blocks = count_host_blocks(
        config,
        bytes_per_block=bytes_per_block,
        block_size=spec.block_size,
        max_model_len=max_model_len,
    )
    planner = Planner(
        _scheduler(config, plugins),
        BlockPool(num_blocks),
        Limits(
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
            max_model_len=max_model_len,
            block_size=spec.block_size,
            enable_chunked_prefill=config.scheduler.enable_chunked_prefill,
            enable_prefix_caching=config.kv_cache.enable_prefix_caching,
            preemption_mode=cast("PreemptionMode", config.scheduler.preemption_mode),
        ),
        policy=config.scheduler.policy,
        host=BlockPool(host_blocks) if host_blocks else None,
    )
    sampler = Sampler(config.runtime.seed)
    info = EngineInfo(
        model=config.model.path,
        architecture=model_config.model_type,
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        policy=config.scheduler.policy,
        backend=name,
        quantizer=config.kv_cache.quantizer,
        block_size=spec.block_size,
        num_blocks=num_blocks,
        bytes_per_block=bytes_per_block,
        max_model_len=max_model_len,
    )
    return Engine(
        planner,
        ModelRunner(model, backend, sampler, device, host_blocks),
        PromptEncoder(tokenizer, model.vocab_size, max_model_len),
        plugins,
        info,
        eos_token_ids=_eos_token_ids(model_config, model.vocab_size),
        debug=config.runtime.debug,
    )


def _tokenizer(path: str | None, loader: WeightLoader) -> PreTrainedTokenizerBase | None:
    if path is None:
        return loader.tokenizer()
    try:
        return AutoTokenizer.from_pretrained(path)  # its code, if any, is never run
    except (OSError, ValueError) as error:
        raise PageloomError(f"model.tokenizer {path} cannot be loaded: {error}") from error


def _dtype(wanted: str, model_config: PretrainedConfig) -> torch.dtype:
    """``auto`` is the dtype that the checkpoint names, or bfloat16."""
    if wanted == "auto":
        return getattr(model_config, "dtype", None) or torch.bfloat16
    dtype: torch.dtype = getattr(torch, wanted)
    return dtype


def _max_model_len(wanted: int | None, model_config: PretrainedConfig) -> int:
    trained: int | None = getattr(model_config, "max_position_embeddings", None)
    longest = wanted or trained
    if longest is None:
        raise PageloomError("the model does not say how long it can be; set model.max_model_len")
    if trained is not None and longest > trained:
        raise PageloomError(
            f"model.max_model_len is {longest}, but the model was made for {trained} tokens at most"
        )
    return longest


def _eos_token_ids(model_config: PretrainedConfig, vocab_size: int) -> frozenset[int]:
    """The ids that end a generation; those that the model can never produce are left out."""
    ids = model_config.eos_token_id
    if ids is None:
        return frozenset()
    return frozenset(i for i in ([ids] if isinstance(ids, int) else ids) if 0 <= i < vocab_size)


def _scheduler(config: Config, plugins: Plugins) -> Scheduler:
    policy: type[Scheduler] = plugins.get("scheduler", config.scheduler.policy)
    options = build_options(policy, config.scheduler.options)
    with blame("scheduler", config.scheduler.policy):
        return policy(options)


def _quantizer(
    config: Config, plugins: Plugins, loader: WeightLoader, model: Model
) -> KVQuantizer | None:
    name = config.kv_cache.quantizer
    if name is None:
        return None
    chosen: type[KVQuantizer] = plugins.get("kv_quantizer", name)
    options = build_options(chosen, config.kv_cache.options)
    with blame("kv_quantizer", name):
        quantizer = chosen(options)
        try:
            for size in {layer.head_size for layer in model.layers}:
                quantizer.bytes_per_vector(size)
            quantizer.set_scales(len(model.layers), loader.kv_scales())
        except ValueError as error:
            raise PageloomError(f"kv_cache.quantizer {name}: {error}") from error
        return quantizer
