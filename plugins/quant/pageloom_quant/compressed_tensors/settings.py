"""What ``quantization_config`` says of a compressed-tensors checkpoint.

Format: https://github.com/vllm-project/compressed-tensors, `QuantizationConfig` and its parts.
Every error is a `ValueError` with a sentence that goes on after "config.json has".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import regex

FORMAT = "pack-quantized"
BITS = 4
LINEAR = "Linear"
REGEX = "re:"
PATIENCE = 1.0  # seconds for one match: a pattern may need more than the universe has
PRESETS = {
    "W4A16": {"num_bits": 4, "group_size": 128},
    "W4A16_ASYM": {"num_bits": 4, "group_size": 128, "symmetric": False},
}


@dataclass(frozen=True)
class Scheme:
    """How the layers of one of the ``config_groups`` are stored."""

    targets: tuple[str, ...]
    group_size: int  # inputs that share a scale; -1 is all of them
    symmetric: bool


@dataclass(frozen=True)
class Settings:
    schemes: tuple[Scheme, ...]
    ignore: tuple[str, ...]

    def scheme_of(self, layer: str) -> Scheme | None:
        """The scheme of a linear layer, None if it should not be quantized.

        A layer's own name goes before a pattern, and that before the class, as in
        compressed-tensors.
        """
        if any(_rank(layer, entry) is not None for entry in self.ignore):
            return None
        ranked = [
            (rank, number)
            for number, scheme in enumerate(self.schemes)
            for target in scheme.targets
            if (rank := _rank(layer, target)) is not None
        ]
        return self.schemes[min(ranked)[1]] if ranked else None


def read_settings(section: Mapping[str, Any]) -> Settings:
    """The settings in ``quantization_config``, if they are weights of 4 bits and nothing else."""
    groups = section.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ValueError("no config_groups in its quantization_config, which say what is quantized")
    for other in ("sparsity_config", "transform_config"):
        content = section.get(other)
        if content and not (isinstance(content, Mapping) and content.get("format") == "dense"):
            raise ValueError(f"a {other}, which this loader cannot apply")
    default = section.get("format")
    schemes = tuple(_scheme(name, group, default) for name, group in groups.items())
    return Settings(schemes, _names(section.get("ignore") or (), "ignore"))


def _scheme(name: str, group: Any, default_format: object) -> Scheme:
    where = f"config_groups.{name}"
    if isinstance(group, Sequence) and not isinstance(group, str):
        weights = PRESETS.get(name.upper())
        if weights is None:
            known = " and ".join(PRESETS)
            raise ValueError(f"the preset {name!r} in config_groups, but can only have {known}")
        group = {"targets": group, "weights": weights}
    if not isinstance(group, Mapping):
        raise ValueError(f"{where} {group!r}, which is no description of layers")
    stored = group.get("format") or default_format
    if stored != FORMAT:
        raise ValueError(
            f"{where} in the format {stored!r}, but this loader reads only {FORMAT!r}, of weights "
            f"with {BITS} bits"
        )
    for kind in ("input_activations", "output_activations"):
        if group.get(kind):
            raise ValueError(f"{where}.{kind}, but this loader quantizes no activations")
    size, symmetric = _weights(f"{where}.weights", group.get("weights"))
    return Scheme(_names(group.get("targets"), f"{where}.targets"), size, symmetric)


def _weights(where: str, weights: Any) -> tuple[int, bool]:
    """Group size and whether codes are symmetric."""
    if not isinstance(weights, Mapping):
        raise ValueError(f"{where} {weights!r}, which does not say how weights are stored")
    bits, kind = weights.get("num_bits", 8), weights.get("type", "int")
    if type(bits) is not int or bits != BITS or kind != "int":
        raise ValueError(
            f"{where} of type {kind!r} with {bits!r} bits, but this loader reads only 'int' with "
            f"{BITS} bits"
        )
    order = weights.get("actorder")
    if order not in (None, False, "weight", "static"):
        raise ValueError(
            f"{where}.actorder {order!r}, which takes inputs out of order; only 'weight' (also "
            "called 'static') keeps them"
        )
    symmetric = weights.get("symmetric", True)
    if not isinstance(symmetric, bool):
        raise ValueError(f"{where}.symmetric {symmetric!r}, which must be true or false")
    return _group_size(where, weights), symmetric


def _group_size(where: str, weights: Mapping[str, Any]) -> int:
    size, strategy = weights.get("group_size"), weights.get("strategy")
    if strategy is None and size is not None:
        strategy = "channel" if size == -1 else "group"
    if strategy == "channel" and size in (None, -1):
        return -1
    if strategy != "group":
        raise ValueError(
            f"{where}.strategy {strategy!r}, but only 'group' and 'channel' can be read"
        )
    if type(size) is not int or size < 1:
        raise ValueError(f"{where}.group_size {size!r}, which must be at least 1")
    return size


def _names(entries: Any, where: str) -> tuple[str, ...]:
    """Names of layers or classes, and patterns after ``re:``."""
    listed = isinstance(entries, Sequence) and not isinstance(entries, str)
    if not listed or not all(isinstance(entry, str) for entry in entries):
        raise ValueError(f"{where} {entries!r}, which must be a list of names")
    for entry in entries:
        if entry.startswith(REGEX):
            try:
                regex.compile(entry.removeprefix(REGEX))
            except (regex.error, OverflowError, RecursionError) as error:
                raise ValueError(f"{where} {entry!r}, which is no pattern: {error}") from error
    return tuple(entries)


def _rank(layer: str, entry: str) -> int | None:
    """How closely ``entry`` means ``layer``, 0 the closest; None if it does not."""
    if entry == layer:
        return 0
    if entry.startswith(REGEX):
        try:
            found = regex.match(entry.removeprefix(REGEX), layer, timeout=PATIENCE)
        except TimeoutError:
            raise ValueError(
                f"the pattern {entry!r}, which takes more than {PATIENCE:g} s to match {layer!r}"
            ) from None
        return 1 if found else None
    return 2 if entry == LINEAR else None
