"""Sizes as a configuration writes them."""

from __future__ import annotations

import re
from fractions import Fraction

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|([KMGT])(i?)B)?", re.IGNORECASE)


def bytes_in(size: int | str) -> int | None:
    """Bytes in a size such as ``"4GiB"``, ``"512MiB"``, ``"2GB"`` (decimal) or ``1073741824``;
    None for anything else."""
    match = _SIZE.fullmatch(str(size).strip())
    if match is None:
        return None
    power = "KMGT".index(match[3].upper()) + 1 if match[3] else 0
    return int(Fraction(match[1]) * (1024 if match[4] else 1000) ** power)
