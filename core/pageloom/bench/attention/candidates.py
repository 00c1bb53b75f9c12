"""Who takes part: every registered backend that accepts a case, and kernels of others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pageloom.bench.attention.peers import PEERS
from pageloom.bench.attention.workload import Step, Workload
from pageloom.config import build_options
from pageloom.contract import AttentionBackend, KVQuantizer
from pageloom.errors import PageloomError, one_line, suggest
from pageloom.plugins import PluginError, Plugins

KIND, QUANTIZER = "attention_backend", "kv_quantizer"


class RefusedError(Exception):
    """A backend cannot do a case; the message completes the sentence "<backend> ..."."""


class BrokenError(Exception):
    """A backend said that it can do a case, and cannot."""


@dataclass(frozen=True)
class Candidate:
    name: str
    package: str  # and its version
    backend: type[AttentionBackend] | None
    reason: str = ""  # why there is no `backend`
    is_peer: bool = False

    def prepare(self, workload: Workload, quantizer: KVQuantizer | None) -> Step:
        """Make the backend and bring it to the step of ``workload``.

        Raises `RefusedError` or `BrokenError`.
        """
        if self.backend is None:
            raise RefusedError(self.reason)
        try:
            layout = quantizer.layout if quantizer else None
            spec = workload.spec(self._block_size(self.backend, workload), layout)
            if (reason := self.backend.check(spec)) is not None:
                raise RefusedError(reason)
            options = build_options(self.backend, {})
            return Step.prepare(self.backend(options, spec, quantizer), workload)
        except (RefusedError, KeyboardInterrupt):
            raise
        except PageloomError as error:
            raise RefusedError(f"cannot be made without options: {error}") from error
        except Exception as error:
            raise BrokenError(f"failed: {one_line(error)}") from error

    def _block_size(self, backend: type[AttentionBackend], workload: Workload) -> int:
        case = workload.case
        try:
            return backend.block_size(case.block_size, case.context)
        except ValueError as error:
            raise RefusedError(f"refuses block size {case.block_size}: {error}") from error


def find_candidates(
    plugins: Plugins, only: Sequence[str] | None, peers: Sequence[str]
) -> list[Candidate]:
    """The registered backends, or ``only`` these, then the peers.

    Raises `PageloomError` for a name that nobody registers.
    """
    names = plugins.names(KIND)
    for name in only or ():
        if name not in names:
            raise PageloomError(
                f"backends: there is no attention backend {name!r}; {suggest(name, names)}"
            )
    origin = {
        entry.name: f"{entry.package} {entry.version}"
        for entry in plugins.components
        if entry.kind == KIND
    }
    found = []
    for name in names if only is None else dict.fromkeys(only):
        try:
            found.append(Candidate(name, origin[name], plugins.get(KIND, name)))
        except PluginError as error:
            found.append(Candidate(name, origin[name], None, error.reason or str(error)))
    return found + [
        Candidate(name, f"torch {torch.__version__}", PEERS[name], is_peer=True) for name in peers
    ]


def make_quantizer(plugins: Plugins, name: str | None) -> KVQuantizer | None:
    """Raises `PageloomError` for a name that nobody registers, and for one that needs options."""
    if name is None:
        return None
    quantizer: type[KVQuantizer] = plugins.get(QUANTIZER, name)
    return quantizer(build_options(quantizer, {}))
