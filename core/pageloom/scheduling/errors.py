"""What is wrong with a request."""

from __future__ import annotations

from typing import Self


class RequestError(ValueError):
    """A request cannot be served as it is; ``field`` is which of its fields is at fault, if one
    is."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field

    @classmethod
    def of(cls, field: str, fault: str) -> Self:
        """Of a message that begins with the field."""
        return cls(f"{field} {fault}", field)


class RequestTooLargeError(RequestError):
    """A request that could never run: longer than the model, the pool or a step allows."""


def field_at_fault(error: ValueError) -> str | None:
    """Which field of a request ``error`` is about, if it says."""
    return error.field if isinstance(error, RequestError) else None
