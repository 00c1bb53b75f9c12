"""Filling parameters from a stream of named tensors."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from pageloom.contract import Slice, pretrained
from pageloom.models.model import UnsupportedModelError

WEIGHT_DTYPES = frozenset(getattr(torch, name) for name in pretrained.WEIGHT_DTYPES)

_BASE_PREFIX = "model."


class WeightSlots:
    """Where each tensor of a checkpoint goes, and which have not come yet.

    A slot is a view of a parameter, often some rows of a merged one, so a tensor is copied once,
    into its place and dtype, and nothing else is held.
    """

    def __init__(self) -> None:
        self._slots: dict[str, torch.Tensor] = {}
        self._parts: dict[str, Slice | None] = {}
        self._refused: set[str] = set()

    def add(self, name: str, target: torch.Tensor, part: Slice | None = None) -> None:
        """Expect tensor ``name`` and copy it, or the ``part`` of it, into ``target``."""
        self._slots[name] = target
        if part is not None:
            self._parts[name] = part

    def refuse(self, name: str) -> None:
        """Tensor ``name`` is there already, and must not come again."""
        self._refused.add(name)

    def leave_out_others(self, names: Iterable[str]) -> None:
        """Nothing is needed of the rest of ``names``: other ranks have that, or nobody has."""
        known = self._slots.keys() | self._refused
        self._parts.update((name, None) for name in names if name not in known)

    def parts(self) -> dict[str, Slice | None]:
        """What to ask `WeightLoader.tensors_of` for."""
        short = {name.removeprefix(_BASE_PREFIX): part for name, part in self._parts.items()}
        return short | self._parts

    def fill(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy every tensor into its slot.

        Raises `UnsupportedModelError` that lists the tensors that are missing, unexpected, of
        another shape, or of a dtype outside `WEIGHT_DTYPES`.
        """
        missing = dict(self._slots)
        unexpected, misshapen, mistyped = [], [], []
        for name, tensor in tensors:
            target = missing.pop(self._resolve(name), None)
            if target is None:
                # Old Llama checkpoints carry rotary frequencies; those of the configuration count.
                if not name.endswith("rotary_emb.inv_freq"):
                    unexpected.append(name)
            elif tensor.dtype not in WEIGHT_DTYPES:
                mistyped.append(describe_dtype(name, tensor))
            elif target.shape != tensor.shape:
                misshapen.append(f"{name} is {list(tensor.shape)}, not {list(target.shape)}")
            else:
                target.copy_(tensor)
        report_weights(missing, unexpected, misshapen, mistyped)

    def _resolve(self, name: str) -> str:
        # Checkpoints saved from the base model lack its prefix.
        return name if name in self._slots else _BASE_PREFIX + name


def describe_dtype(name: str, tensor: torch.Tensor) -> str:
    """How `report_weights` names a tensor of the wrong dtype."""
    return f"{name} is {str(tensor.dtype).removeprefix('torch.')}"


def report_weights(
    missing: Iterable[str],
    unexpected: Iterable[str],
    misshapen: Iterable[str],
    mistyped: Iterable[str],
) -> None:
    """Raise `UnsupportedModelError` unless all four are empty."""
    problems = {
        "missing": sorted(missing),
        "unexpected or repeated": sorted(unexpected),
        "of the wrong shape": sorted(misshapen),
        "quantized or of no floating-point dtype, which this loader does not unpack": sorted(
            mistyped
        ),
    }
    found = [f"{kind}: {_some(names)}" for kind, names in problems.items() if names]
    if found:
        raise UnsupportedModelError(
            "The weights do not fit the model's configuration; tensors " + "; ".join(found) + "."
        )


def _some(names: list[str], most: int = 8) -> str:
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
