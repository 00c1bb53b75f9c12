"""The errors that a user can act on. Commands print their message alone and exit with code 2."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class PageloomError(Exception):
    """Something the user can put right; the message says what was wrong, where, and what works."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """The valid name that ``name`` was probably meant to be, or ``""``."""
    return next(iter(get_close_matches(name, list(valid), n=1)), "")


def suggest(name: str, valid: Iterable[str]) -> str:
    """The end of a sentence that said ``name`` is unknown: the nearest name, then all of them."""
    names = sorted(valid)
    listed = f"there are {', '.join(names)}" if names else "there are none"
    guess = nearest(name, names)
    return f"did you mean {guess!r}? {listed}" if guess else listed


def one_line(error: BaseException) -> str:
    """``Type: message`` without line breaks."""
    return " ".join(f"{type(error).__name__}: {error}".split()).rstrip(":")
