"""API keys."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

from pageloom.config.schema import ServerConfig
from pageloom.errors import PageloomError


class Keys:
    """Who is let in: everyone, if there are no keys."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def admit(self, authorization: bytes | None) -> bool:
        """Whether the header ``authorization`` is ``Bearer KEY`` of a key. How long this takes
        tells nothing of the keys: digests are compared, whole, and always all of them."""
        scheme, _, key = (authorization or b"").partition(b" ")
        given = _digest(key.strip())
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return not matches or (any(matches) and scheme.lower() == b"bearer")


def read_keys(config: ServerConfig) -> Keys:
    """Those of ``api_keys`` and of ``api_key_file``, where empty lines and such that begin with #
    do not count. Raises `PageloomError`."""
    keys = list(config.api_keys)
    if any(not key.strip() for key in keys):
        raise PageloomError("server.api_keys has a key that is empty")
    if config.api_key_file is not None:
        keys += _read(config.api_key_file)
    for key in keys:
        if not (key.isascii() and key.isprintable()) or " " in key:
            raise PageloomError(
                "an API key has a space or a character that is not ASCII, which clients cannot send"
            )
    return Keys(keys)


def _read(path: str) -> list[str]:
    try:
        lines = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise PageloomError(f"server.api_key_file {path} cannot be read: {error}") from error
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:  # not a way to switch keys off
        raise PageloomError(f"server.api_key_file {path} has no key; write one per line")
    return keys


def _digest(key: bytes) -> bytes:
    return sha256(key).digest()
