"""The engines that a configuration asks the server to have."""

from __future__ import annotations

from collections.abc import Sequence

from pageloom.config import Config
from pageloom.errors import PageloomError
from pageloom.serve.client import EngineClient
from pageloom.serve.replicas import Replicas
from pageloom.serve.replicas_cards import environments
from pageloom.serve.replicas_routing import Router
from pageloom.serve.replicas_scaling import Scaling

Engines = EngineClient | Replicas


def make_engines(config: Config, path: str, overrides: Sequence[str]) -> Engines:
    """One engine, or as many as ``parallel.replicas`` and ``parallel.max_replicas`` say. None is
    started yet. Raises `PageloomError` for what cannot be had."""
    parallel, timeout = config.parallel, config.server.engine_timeout_seconds
    least, most = parallel.replicas, parallel.most_replicas
    if most < least:
        raise PageloomError(
            f"parallel.max_replicas is {most}, less than parallel.replicas, {least}"
        )
    if most == 1:
        return EngineClient(path, overrides, timeout=timeout)
    found = environments(config, most)

    def make(number: int) -> EngineClient:
        return EngineClient(path, overrides, timeout=timeout, environment=found[number])

    return Replicas(
        make,
        least,
        Router(parallel.routing),
        scaling=Scaling(least, most, config.scheduler.max_num_seqs) if most > least else None,
        restart=config.server.restart_engine,
    )
