"""What goes wrong, as the OpenAI API says it.

The body is ``{"error": {"message", "type", "param", "code"}}``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pageloom.errors import shorten

MAX_MESSAGE, MAX_PARAM = 1000, 200  # characters; either may quote what the client sent


@dataclass
class APIError(Exception):
    """An answer to a client that something went wrong. ``param`` is the field at fault."""

    message: str
    status: int = 400
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None  # seconds

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": shorten(self.message, MAX_MESSAGE),
                "type": self.type,
                "param": self.param and self.param[:MAX_PARAM],
                "code": self.code,
            }
        }

    def headers(self) -> dict[str, str]:
        found = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        if self.status == 401:
            found["www-authenticate"] = "Bearer"
        return found


def engine_died() -> APIError:
    return APIError(
        "the engine has stopped; the request was not finished", 503, "server_error", None, "engine"
    )


def step_failed() -> APIError:
    return APIError(
        "the engine could not compute this request", 500, "server_error", None, "engine"
    )


def internal_error() -> APIError:
    """The log says which."""
    return APIError("internal error", 500, "server_error", None, "internal")


def wrong_key() -> APIError:
    return APIError(
        "send an API key that is valid here, as the header 'authorization: Bearer KEY'",
        401,
        "authentication_error",
        None,
        "invalid_api_key",
    )


def draining() -> APIError:
    return APIError("the server is shutting down", 503, "server_error", None, "draining")


def too_large(max_body: int | str) -> APIError:
    return APIError(f"the body is larger than {max_body} (server.max_body)", 413)


def too_long(tokens: int, max_model_len: int, param: str) -> APIError:
    return APIError(
        f"the request has a prompt of {tokens} tokens, but max_model_len is {max_model_len} and "
        "must leave room for one output token",
        param=param,
        code="context_length_exceeded",
    )


def too_many(prompts: int, max_waiting: int) -> APIError:
    return APIError(
        f"there are {prompts} prompts, but no more than {max_waiting} requests may wait here "
        "(server.max_waiting); send fewer at a time",
        param="prompt",
    )


def stalled(seconds: float) -> APIError:
    return APIError(f"nothing more of the request came for {seconds:g} seconds", 408)


def too_slow(rate: int) -> APIError:
    return APIError(f"the body of the request came at less than {rate} bytes per second", 408)


def client_left() -> APIError:
    """Nobody reads this."""
    return APIError("the client has gone", 499)


def overloaded(waiting: int, retry_after: int = 1) -> APIError:
    return APIError(
        f"{waiting} requests are open or waiting already; try again later",
        429,
        "rate_limit_error",
        None,
        "overloaded",
        retry_after,
    )
