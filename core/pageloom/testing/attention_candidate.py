"""A backend that is to be tested, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from pageloom.contract import AttentionBackend, AttentionSpec, KVQuantizer
from pageloom.testing.attention_cases import Case

# In this order: what can be told apart best comes first.
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class RefusedError(Exception):
    """The backend will not do what is asked; the message is its reason."""


@dataclass(frozen=True)
class Candidate:
    """A backend to be tested, and with what."""

    name: str
    backend: type[AttentionBackend]
    device: torch.device
    options: Mapping[str, Any] = field(default_factory=dict)
    quantizers: Mapping[str, Callable[[], type[KVQuantizer]]] = field(default_factory=dict)

    def spec(self, case: Case) -> AttentionSpec:
        """What the engine would ask for in this case. Raises `RefusedError`."""
        reasons: dict[str, None] = {}
        for dtype in [case.dtype] if case.dtype else DTYPES:
            for block_size in [case.block_size] if case.block_size else (16, None):
                try:
                    return self._ask(case, dtype, block_size)
                except RefusedError as error:
                    reasons[str(error)] = None
        raise RefusedError("; ".join(reasons))

    def refusal(self, case: Case) -> str | None:
        """Why the backend will not do this, None if it will."""
        try:
            self.spec(case)
        except RefusedError as error:
            return str(error)
        return None

    def quantizer(self, case: Case) -> KVQuantizer | None:
        """Raises `RefusedError` if the format does not hold one of the head sizes."""
        if case.quantizer is None:
            return None
        made = self.quantizers[case.quantizer]()
        quantizer = made(made.Config())
        for each in case.layers:
            try:
                quantizer.bytes_per_vector(each.head_size)
            except ValueError as error:
                raise RefusedError(f"with {case.quantizer}: {error}") from error
        return quantizer

    def _ask(self, case: Case, dtype: torch.dtype, block_size: int | None) -> AttentionSpec:
        try:
            answered = self.backend.block_size(block_size, case.max_model_len)
        except ValueError as error:
            raise RefusedError(f"{self.name} refuses block size {block_size}: {error}") from error
        assert block_size in (None, answered), f"block_size answered {answered} to {block_size}"
        layout = self.quantizers[case.quantizer]().layout if case.quantizer else None
        spec = AttentionSpec(
            self.device, dtype, case.layers, answered, case.max_model_len, case.quantizer, layout
        )
        reason = self.backend.check(spec)
        assert reason is None or (isinstance(reason, str) and reason.strip()), (
            f"check must answer None or a reason, not {reason!r}"
        )
        if reason is not None:
            raise RefusedError(f"{self.name} {reason}")
        try:
            torch.empty(0, device=self.device)
        except (RuntimeError, AssertionError) as error:
            raise RefusedError(f"there is no device {self.device} here") from error
        return spec
