"""A server in a process of its own, and many clients of it at once, for the benchmarks beside."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass
class Served:
    """A server that answers."""

    process: subprocess.Popen[str]
    host: str
    port: int

    def complete(self, bodies: Sequence[Mapping[str, Any]], at_once: int) -> int:
        """Stream all of them from as many connections as are allowed at once; the number of events
        that came. Raises `RuntimeError` for an answer that is not 200."""
        return asyncio.run(self._complete(bodies, at_once))

    async def _complete(self, bodies: Sequence[Mapping[str, Any]], at_once: int) -> int:
        turn = asyncio.Semaphore(at_once)

        async def one(body: Mapping[str, Any]) -> int:
            async with turn:
                return await self._stream(body)

        return sum(await asyncio.gather(*map(one, bodies)))

    async def _stream(self, body: Mapping[str, Any]) -> int:
        """Plain sockets: a client library would cost more than the server that is measured."""
        reader, writer = await asyncio.open_connection(self.host, self.port)
        content = json.dumps({**body, "stream": True}).encode()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: bench\r\nconnection: close\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(content) + content
        )
        try:
            answer = await reader.readuntil(b"\r\n\r\n")
            if not answer.startswith(b"HTTP/1.1 200 "):
                raise RuntimeError((answer + await reader.read(2000)).decode())
            events = 0
            async for line in reader:
                events += line.startswith(b"data: {")
            return events
        finally:
            writer.close()


@contextlib.contextmanager
def serve(config: str, overrides: Sequence[str]) -> Iterator[Served]:
    sets = [part for override in overrides for part in ("--set", override)]
    process = subprocess.Popen(
        [sys.executable, "-m", "pageloom", "serve", config, "--port", "0", *sets],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if found := re.search(r"served at http://(\S+):(\d+)/v1", line):
                yield Served(process, found[1], int(found[2]))
                return
            print(line, end="", file=sys.stderr)
        raise SystemExit("the server does not start")
    finally:
        process.terminate()
        process.wait()
