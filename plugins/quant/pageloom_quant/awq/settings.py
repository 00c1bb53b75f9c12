"""What ``quantization_config`` says of an AWQ checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

BITS = 4
VERSION = "gemm"
DEFAULT_GROUP_SIZE = 128


@dataclass(frozen=True)
class AWQSettings:
    group_size: int  # inputs that share a scale; -1 is all of them
    zero_point: bool  # whether each group has one; else it is 8, the middle of the codes


def read_settings(section: Mapping[str, Any]) -> AWQSettings:
    """The settings in ``quantization_config``, by the names of AutoAWQ or of transformers.

    Raises `ValueError` with a sentence that goes on after "config.json has".
    """
    bits = _either(section, "bits", "w_bit", BITS)
    if type(bits) is not int or bits != BITS:
        raise ValueError(f"AWQ weights of {bits!r} bits, but only {BITS} bits can be read")
    version = section.get("version", VERSION)
    if not isinstance(version, str) or version.lower() != VERSION:
        raise ValueError(
            f"AWQ weights of version {version!r}, whose layout is another than {VERSION!r}, the "
            "only one that can be read"
        )
    group_size = _either(section, "group_size", "q_group_size", DEFAULT_GROUP_SIZE)
    if type(group_size) is not int or (group_size < 1 and group_size != -1):
        raise ValueError(
            f"AWQ groups of {group_size!r}, but the size of a group must be at least 1, or -1 for "
            "all inputs"
        )
    zero_point = section.get("zero_point", True)
    if not isinstance(zero_point, bool):
        raise ValueError(f"zero_point {zero_point!r}, which must be true or false")
    return AWQSettings(group_size, zero_point)


def _either(section: Mapping[str, Any], name: str, other: str, default: int) -> object:
    return section.get(name, section.get(other, default))
