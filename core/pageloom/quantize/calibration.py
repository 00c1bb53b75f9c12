"""Text on which a model is watched while it is quantized."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pageloom.errors import PageloomError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def calibration_text(file: Path | None) -> str:
    """The text in ``file``, or without one the prose of Python's own documentation, which is on
    every machine. Raises `PageloomError` if it cannot be read."""
    if file is None:
        from pydoc_data.topics import topics

        return "\n\n".join(topics.values())
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise PageloomError(f"calibration text cannot be read from {file}: {error}") from error


def cut_windows(
    tokenizer: PreTrainedTokenizerBase, text: str, samples: int, length: int
) -> list[list[int]]:
    """At most ``samples`` windows of ``length`` tokens, spread evenly over ``text``.

    Raises `PageloomError` if the text has not enough tokens for one.
    """
    tokens: list[int] = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    whole = len(tokens) // length
    if whole == 0:
        raise PageloomError(
            f"the calibration text has {len(tokens)} tokens, but one window takes {length}; give "
            "more text or set --length lower"
        )
    taken = min(samples, whole)
    starts = [number * whole // taken * length for number in range(taken)]
    return [tokens[start : start + length] for start in starts]
