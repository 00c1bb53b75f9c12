"""The errors that a user can act on. Commands print their message alone and exit with code 2."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

_LISTED = 20  # names in one sentence


class PageloomError(Exception):
    """Something the user can put right; the message says what was wrong, where, and what works."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """The valid name that ``name`` was probably meant to be in whatever case, or ``""``."""
    folded = {item.casefold(): item for item in valid}
    return next((folded[m] for m in get_close_matches(name.casefold(), folded, n=1)), "")


def suggest(name: str, valid: Iterable[str]) -> str:
    """The end of a sentence that said ``name`` is unknown: the nearest name, then all of them, or
    the nearest few if they are many."""
    names = sorted(valid)
    few = names
    if len(names) > _LISTED:
        few = get_close_matches(name, names, n=5) or names[:5]
    listed = f"there are {', '.join(few)}" if names else "there are none"
    if few is not names:
        listed += f" and {len(names) - len(few)} more"
    guess = nearest(name, names)
    return f"did you mean {guess!r}? {listed}" if guess else listed


def shorten(text: str, limit: int = 80) -> str:
    """``text`` for a sentence: control characters escaped, and cut to ``limit`` characters."""
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[: limit + 1])
    return shown if len(shown) <= limit else shown[: limit - 3] + "..."


def counted(count: int, noun: str, plural: str = "") -> str:
    """``1 block``, ``2,000 blocks``; ``plural`` is for nouns with another one."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def one_line(error: BaseException) -> str:
    """``Type: message`` without line breaks."""
    return " ".join(f"{type(error).__name__}: {error}".split()).rstrip(":")
