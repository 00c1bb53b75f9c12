"""One rank: its part of the model, the attention backend with its cache, and what runs them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch

from pageloom.config import Config, build_options
from pageloom.contract import (
    AttentionSpec,
    Group,
    KVQuantizer,
    StepOutput,
    Worker,
    WorkerError,
    WorkerReport,
)
from pageloom.contract import Step as StepView
from pageloom.contract.quantizer import Kind
from pageloom.engine.backend_choice import choose_backend
from pageloom.engine.capacity import count_blocks, count_host_blocks
from pageloom.engine.device import find_device
from pageloom.engine.load_model import ModelSource, load_model, open_model
from pageloom.engine.memory_report import weight_bytes
from pageloom.errors import PageloomError, one_line
from pageloom.models.model import Model
from pageloom.plugins import blame
from pageloom.runner.graphs import DecodeGraphs, capture_decodes
from pageloom.runner.runner import ModelRunner
from pageloom.runner.sampler import Sampler
from pageloom.runner.step import Step
from pageloom.runner.wire import pack_output, unpack_step


class EngineWorker(Worker):
    """Made from the configuration; raises `PageloomError` for what cannot be loaded."""

    def __init__(
        self, config: Config, group: Group, device: str, source: ModelSource | None = None
    ) -> None:
        """``source`` is the model that the configuration names, if somebody has opened it."""
        self._config = config
        self._rank = group.rank
        self._device = find_device(device, "runtime.device")
        if config.runtime.num_threads:
            torch.set_num_threads(config.runtime.num_threads)
        source = source or open_model(config, config.loaded_plugins)
        self._source = source
        self.model = load_model(config, source, self._device, group)
        quantizer = _quantizer(config, source, self.model)
        self._backend_name, self.backend = choose_backend(
            config,
            config.loaded_plugins,
            AttentionSpec(
                self._device,
                source.dtype,
                self.model.layers,
                0,
                source.max_model_len,
                quantizer=config.kv_cache.quantizer,
                layout=quantizer.layout if quantizer else None,
            ),
            quantizer,
        )
        with blame("attention_backend", self._backend_name):
            self._bytes_per_block = self.backend.bytes_per_block()
        self._runner: ModelRunner | None = None

    @property
    def runner(self) -> ModelRunner:
        """Raises `WorkerError` before `allocate`."""
        if self._runner is None:
            raise WorkerError(f"{self._rank} was given a step before its KV cache")
        return self._runner

    def report(self) -> WorkerReport:
        config, source = self._config, self._source
        block_size = self.backend.spec.block_size
        capacity = count_blocks(
            config,
            self.model,
            bytes_per_block=self._bytes_per_block,
            block_size=block_size,
            max_model_len=source.max_model_len,
            device=self._device,
        )
        host_blocks = count_host_blocks(
            config,
            bytes_per_block=self._bytes_per_block,
            block_size=block_size,
            max_model_len=source.max_model_len,
        )
        return WorkerReport(
            architecture=source.architecture,
            device=str(self._device),
            dtype=str(source.dtype).removeprefix("torch."),
            vocab_size=self.model.vocab_size,
            max_model_len=source.max_model_len,
            backend=self._backend_name,
            block_size=block_size,
            bytes_per_block=self._bytes_per_block,
            num_blocks=capacity.num_blocks,
            host_blocks=host_blocks,
            weights=weight_bytes(self.model.weights()),
            activations=capacity.activations,
        )

    def allocate(self, num_blocks: int, host_blocks: int) -> None:
        try:
            self.backend.allocate(num_blocks)
            graphs = self._capture()
        except PageloomError as error:
            raise ValueError(str(error)) from error
        except (RuntimeError, MemoryError) as error:
            raise ValueError(
                f"{self._backend_name} cannot allocate a KV cache of {num_blocks} blocks, which is "
                f"{num_blocks * self._bytes_per_block:,} bytes: {one_line(error)}; lower "
                "kv_cache.memory or kv_cache.num_blocks"
            ) from error
        sampler = Sampler(self._config.runtime.seed)
        self._runner = ModelRunner(
            self.model, self.backend, sampler, self._device, host_blocks, graphs
        )

    def _capture(self) -> DecodeGraphs | None:
        config = self._config
        if config.runtime.enforce_eager:
            return None
        limits = config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens
        return capture_decodes(self.model, self.backend, min(limits))

    def run(self, step: StepView) -> StepOutput | None:
        return self.runner.run(cast("Step", step))

    def run_packed(self, message: bytes) -> bytes:
        output = self.runner.run(unpack_step(message))
        return b"" if output is None else pack_output(output)


def _quantizer(config: Config, source: ModelSource, model: Model) -> KVQuantizer | None:
    name = config.kv_cache.quantizer
    if name is None:
        return None
    chosen: type[KVQuantizer] = config.loaded_plugins.get("kv_quantizer", name)
    options = build_options(chosen, config.kv_cache.options)
    with blame("kv_quantizer", name):
        quantizer = chosen(options)
        scales = _kv_scales(config, source, model) if quantizer.wants_scales else {}
        try:
            for size in sorted({layer.head_size for layer in model.layers}):
                quantizer.bytes_per_vector(size)
            quantizer.set_scales(len(model.layers), scales)
        except ValueError as error:
            raise PageloomError(f"kv_cache.quantizer {name}: {error}") from error
        return quantizer


def _kv_scales(
    config: Config, source: ModelSource, model: Model
) -> Mapping[tuple[int, Kind], float]:
    """Those of the checkpoint, by the layers of this stage."""
    try:
        return model.of_own_layers(source.loader.kv_scales())
    except (ValueError, OSError) as error:
        raise PageloomError(f"model {config.model.path}: {error}") from error
