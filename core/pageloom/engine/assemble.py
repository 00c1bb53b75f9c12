"""From a configuration to an engine: pick the parts and put them together."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pageloom.config import Config
from pageloom.contract import EngineInfo, Executor, WorkerError, WorkerReport
from pageloom.engine.blueprint import EngineBlueprint
from pageloom.engine.engine import Engine
from pageloom.engine.executor_choice import make_executor
from pageloom.engine.limits import limits_of
from pageloom.engine.load_model import check_ranks, open_model
from pageloom.engine.memory_report import MemoryReport
from pageloom.engine.policy import Policy
from pageloom.engine.prompts import PromptEncoder
from pageloom.errors import PageloomError
from pageloom.memory import BlockPool
from pageloom.plugins import blame
from pageloom.scheduling import Planner

log = logging.getLogger(__name__)


def assemble(config: Config) -> Engine:
    """Build the engine that ``config`` describes from components of its ``loaded_plugins``.

    Raises `PageloomError` for what cannot be built.
    """
    plugins = config.loaded_plugins
    source = open_model(config, plugins)
    if config.parallel.world_size > 1:
        check_ranks(config, source)
    blueprint = EngineBlueprint(config, source)
    name, executor = make_executor(config, plugins, blueprint)
    try:
        with blame("executor", name), _sentences():
            reports = executor.start(blueprint)
            _check_alike(reports)
            num_blocks = min(report.num_blocks for report in reports)
            host_blocks = min(report.host_blocks for report in reports)
            executor.allocate(num_blocks, host_blocks)
        info = _info(config, reports, num_blocks)
        memory = _memory(info, reports, host_blocks)
        for line in memory.lines():
            log.info(line)
        vocab_size = reports[-1].vocab_size
        return Engine(
            _planner(config, info, host_blocks, executor),
            executor,
            PromptEncoder(source.tokenizer, vocab_size, info.max_model_len),
            plugins,
            info,
            memory,
            eos_token_ids=source.eos_token_ids(vocab_size),
            debug=config.runtime.debug,
        )
    except BaseException:
        executor.close()
        raise


@contextmanager
def _sentences() -> Iterator[None]:
    """What workers say of what they cannot load is for the user."""
    try:
        yield
    except (ValueError, WorkerError) as error:
        cause = error.__cause__
        raise cause if isinstance(cause, PageloomError) else PageloomError(str(error)) from error


def _check_alike(reports: Sequence[WorkerReport]) -> None:
    for what in ("backend", "block_size"):
        found = sorted({str(getattr(report, what)) for report in reports})
        if len(found) > 1:
            raise PageloomError(
                f"the ranks differ in their attention {what}: {', '.join(found)}; set "
                "attention.backend and kv_cache.block_size to what all of them can use"
            )


def _info(config: Config, reports: Sequence[WorkerReport], num_blocks: int) -> EngineInfo:
    first = reports[0]
    devices = [report.device for report in reports]
    return EngineInfo(
        model=config.model.path,
        architecture=first.architecture,
        device=devices[0] if len(devices) == 1 else f"{len(devices)} ranks ({devices[0]} ...)",
        dtype=first.dtype,
        policy=config.scheduler.policy,
        backend=first.backend,
        quantizer=config.kv_cache.quantizer,
        block_size=first.block_size,
        num_blocks=num_blocks,
        bytes_per_block=sum(report.bytes_per_block for report in reports),
        max_model_len=first.max_model_len,
    )


def _memory(info: EngineInfo, reports: Sequence[WorkerReport], host_blocks: int) -> MemoryReport:
    """Of all ranks together."""
    weights: Counter[str] = Counter()
    for report in reports:
        weights.update(report.weights)
    activations = [r.activations for r in reports if r.activations is not None]
    return MemoryReport(
        device=info.device,
        weights=dict(weights.most_common()),
        kv_format=info.quantizer or info.dtype,
        block_size=info.block_size,
        num_blocks=info.num_blocks,
        bytes_per_block=info.bytes_per_block,
        max_model_len=info.max_model_len,
        host_blocks=host_blocks,
        activations=sum(activations) if activations else None,
    )


def _planner(config: Config, info: EngineInfo, host_blocks: int, executor: Executor) -> Planner:
    policy = Policy.of(config)
    return Planner(
        policy.new_scheduler(),
        BlockPool(info.num_blocks),
        limits_of(config, block_size=info.block_size, max_model_len=info.max_model_len),
        policy=policy.name,
        host=BlockPool(host_blocks) if host_blocks else None,
        clock=executor.clock,
        steps_in_flight=executor.max_in_flight,
    )
