"""How a field of the schema is declared: its default, what it means, and which values it takes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pageloom.contract.sizes import bytes_in
from pageloom.errors import shorten


@dataclass(frozen=True)
class Rule:
    """Which values of the right type are accepted (null is none of its business)."""

    expected: str
    accepts: Callable[[Any], bool]


def option(default: Any, doc: str, rule: Rule | None = None) -> Any:
    """A dataclass field with its documentation, and a rule beyond its type."""
    metadata = {"doc": doc, "rule": rule}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def at_least(minimum: int) -> Rule:
    return Rule(f"an integer of at least {minimum}", lambda value: value >= minimum)


def between(minimum: int, maximum: int) -> Rule:
    return Rule(
        f"an integer from {minimum} to {maximum}", lambda value: minimum <= value <= maximum
    )


def one_of(*choices: str) -> Rule:
    return Rule(f"one of {', '.join(choices)}", lambda value: value in choices)


def matching(pattern: str, expected: str) -> Rule:
    return Rule(expected, lambda value: re.fullmatch(pattern, value) is not None)


FRACTION = Rule("a number above 0 and at most 1", lambda value: 0 < value <= 1)


def parse_size(size: int | str) -> int:
    """Bytes in a size such as ``"4GiB"``, ``"512MiB"``, ``"2GB"`` (decimal) or ``1073741824``.

    Raises `ValueError` for anything else, and for less than one byte.
    """
    number = bytes_in(size)
    if number is None:
        raise ValueError(f"{shorten(str(size))!r} is not a size such as 4GiB or 512MiB")
    if not 1 <= number < 2**63:
        raise ValueError(f"{shorten(str(size))!r} is less than one byte, or more than any cache")
    return number


def _is_size(value: int | str) -> bool:
    try:
        return parse_size(value) > 0
    except ValueError:
        return False


SIZE = Rule('a size such as "4GiB" or "512MiB", or a number of bytes above 0', _is_size)
SIZE_OR_NONE = Rule(
    'a size such as "4GiB" or "512MiB", or a number of bytes (0 for none)',
    lambda value: bytes_in(value) == 0 or _is_size(value),
)
