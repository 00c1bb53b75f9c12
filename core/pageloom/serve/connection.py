"""Connections, before there is a request that anybody could look at."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from pageloom.serve.errors import APIError, stalled

MAX_HEAD = 1 << 16  # bytes; up to one read more where they come at once


class Connection(HttpToolsProtocol):
    """uvicorn's, which waits for the head of a request for ever, and takes one of any size."""

    def __init__(self, stall_seconds: float, **options: Any) -> None:
        super().__init__(**options)
        self._stall_seconds = stall_seconds
        self._timer: asyncio.TimerHandle | None = None
        self._in_head = True
        self._held = 0  # bytes since the last that were handed on: of a head, or of trailers

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_nothing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._held += len(data)
        if self._in_head:
            self._expect_head()
        super().data_received(data)
        if self._held > MAX_HEAD and not self.transport.is_closing():
            self._refuse(APIError(f"the headers are larger than {MAX_HEAD >> 10} KiB", 431))

    def on_headers_complete(self) -> None:
        self._in_head, self._held = False, 0
        self._expect_nothing()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._held = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_head, self._held = True, 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._in_head:  # nobody reads the rest of this body, however long it may come
            self._expect_head()

    def send_400_response(self, msg: str) -> None:
        self._expect_nothing()
        self._refuse(APIError("this is not a valid HTTP request"))

    def _unsupported_upgrade_warning(self) -> None:
        """There is no websocket here, and none is missed."""

    def _expect_head(self) -> None:
        """Within the time there is from now on, unless that runs already."""
        if self._timer is None:
            self._timer = self.loop.call_later(self._stall_seconds, self._give_up)

    def _expect_nothing(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._timer = None
        if self._answers:  # what has come of the next request must not end this one
            self._expect_head()
        elif self._held and self._in_head:
            self._refuse(stalled(self._stall_seconds))
        else:  # an answer to nothing would be taken for that to what comes next
            self.transport.close()

    @property
    def _answers(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, error: APIError) -> None:
        """Answer, unless that would be in the middle of another answer, and close."""
        if self._answers:
            if self.cycle.response_started:
                self.transport.abort()
                return
            self.cycle.disconnected = True  # nothing may follow
            self.cycle.message_event.set()
        body = json.dumps(error.body()).encode()
        self.transport.write(
            STATUS_LINE[error.status]
            + b"content-type: application/json\r\nconnection: close\r\n"
            + b"content-length: %d\r\n\r\n" % len(body)
            + body
        )
        self.transport.close()
