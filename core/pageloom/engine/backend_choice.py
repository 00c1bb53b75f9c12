"""Which attention backend serves a model here."""

from __future__ import annotations

import logging
from dataclasses import replace

from pageloom.config import Config, build_options
from pageloom.contract import AttentionBackend, AttentionSpec, KVQuantizer
from pageloom.contract.native import NativeBuildError
from pageloom.errors import PageloomError, one_line, shorten
from pageloom.plugins import PluginError, Plugins, blame

log = logging.getLogger(__name__)

KIND = "attention_backend"


class NotBuiltError(PageloomError):
    """A backend's own code cannot be compiled here."""


def choose_backend(
    config: Config, plugins: Plugins, spec: AttentionSpec, quantizer: KVQuantizer | None
) -> tuple[str, AttentionBackend]:
    """The backend that ``attention.backend`` names, or for ``auto`` the highest rank that accepts
    and can be made; its name, and an instance.

    ``spec`` is what is asked for, with any block size: the instance has the one that it answered.
    Raises `PageloomError` with every reason if none will do; a refusal that makes ``auto`` take a
    lower rank is logged.
    """
    if config.attention.backend != "auto":
        name = config.attention.backend
        backend: type[AttentionBackend] = plugins.get(KIND, name)
        answer = _ask(backend, config, spec)
        if isinstance(answer, str):
            raise PageloomError(f"attention.backend {name} {answer}")
        return name, _make(name, backend, config, answer, quantizer)
    refused: list[str] = []
    for name, backend in _ranked(plugins, refused):
        answer = _ask(backend, config, spec)
        if isinstance(answer, str):
            refused.append(f"{name} {answer}")
            continue
        try:
            made = _make(name, backend, config, answer, quantizer)
        except NotBuiltError as error:
            refused.append(str(error))
            continue
        for reason in refused:
            log.warning("attention backend %s; %s takes over", reason, name)
        return name, made
    reasons = "; ".join(refused) or "none is registered"
    raise PageloomError(f"no attention backend can run this model here: {reasons}")


def _make(
    name: str,
    backend: type[AttentionBackend],
    config: Config,
    spec: AttentionSpec,
    quantizer: KVQuantizer | None,
) -> AttentionBackend:
    options = build_options(backend, config.attention.options)
    with blame(KIND, name):
        try:
            return backend(options, spec, quantizer)
        except NativeBuildError as error:
            log.debug("%s", error)
            raise NotBuiltError(f"{name} cannot be compiled: {_main_line(error)}") from error


def _main_line(error: NativeBuildError) -> str:
    """What a compiler complains of, without all that it says about it."""
    lines = str(error).splitlines()
    return shorten(next((line for line in lines if " error: " in line), lines[0]), 200)


def _ranked(plugins: Plugins, failed: list[str]) -> list[tuple[str, type[AttentionBackend]]]:
    """The backends that ``auto`` may take, best first; those that cannot be imported go to
    ``failed``."""
    found: list[tuple[str, type[AttentionBackend]]] = []
    for name in plugins.names(KIND):
        try:
            backend: type[AttentionBackend] = plugins.get(KIND, name)
        except PluginError as error:
            failed.append(str(error))
            continue
        if not isinstance(backend.auto_rank, int):
            failed.append(f"{name} is broken: its auto_rank is {backend.auto_rank!r}")
        elif backend.auto_rank > 0:
            found.append((name, backend))
    return sorted(found, key=lambda entry: -entry[1].auto_rank)


def _ask(
    backend: type[AttentionBackend], config: Config, spec: AttentionSpec
) -> AttentionSpec | str:
    """The spec with the backend's block size, or why it refuses."""
    try:
        block_size = backend.block_size(config.kv_cache.block_size, spec.max_model_len)
    except ValueError as error:
        return f"refuses kv_cache.block_size {config.kv_cache.block_size}: {error}"
    except Exception as error:
        return f"is broken: its block_size raised {one_line(error)}"
    if not isinstance(block_size, int) or block_size < 1:
        return f"is broken: its block_size is {block_size!r}"
    answered = replace(spec, block_size=block_size)
    try:
        return backend.check(answered) or answered
    except Exception as error:
        return f"is broken: its check raised {one_line(error)}"
