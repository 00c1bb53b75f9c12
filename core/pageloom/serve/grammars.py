"""Whether a grammar that a client sent can be used, found out where it can do no harm."""

from __future__ import annotations

import asyncio
import sys
from collections import OrderedDict
from typing import Any

import msgspec

from pageloom.engine.prompts import PromptEncoder
from pageloom.engine.tokenizer_spec import tokenizer_json
from pageloom.scheduling.structured import StructuredOutput
from pageloom.serve.errors import overloaded
from pageloom.serve.leave import kill
from pageloom.serve.trial import CPU_SECONDS, Tokenizer, Trial, Verdict

MAX_KNOWN = 1024  # verdicts that are remembered
MAX_WAITING = 64  # grammars that nobody knows yet
WALL_SECONDS = 15 * CPU_SECONDS  # for one, on a busy machine
LINE_LIMIT = 1 << 24  # bytes


class Grammars:
    """Tries grammars out, one at a time, in a process of its own: see `pageloom.serve.trial`.

    The process is started by the first grammar, and again after one that ended it. It ends with
    this one, if not by `close`. Used by the tasks of one event loop.
    """

    def __init__(self, prompts: PromptEncoder) -> None:
        self._prompts = prompts
        self._known: OrderedDict[StructuredOutput, str | None] = OrderedDict()
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._waiting = 0

    async def check(self, wanted: StructuredOutput) -> None:
        """Raises `ValueError` for what the engine could not use, or not soon enough; `APIError` if
        too many wait to be told."""
        if wanted not in self._known:
            if self._waiting >= MAX_WAITING:
                raise overloaded(self._waiting)
            self._waiting += 1
            try:
                async with self._turn:
                    if wanted not in self._known:
                        self._remember(wanted, await self._try(wanted))
            finally:
                self._waiting -= 1
        self._known.move_to_end(wanted)
        if fault := self._known[wanted]:
            raise ValueError(fault)

    async def close(self) -> None:
        """End the process."""
        if self._process is not None:
            kill(self._process)
            await self._process.wait()
        self._process = None

    def _remember(self, wanted: StructuredOutput, fault: str | None) -> None:
        self._known[wanted] = fault
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    async def _try(self, wanted: StructuredOutput) -> str | None:
        if self._prompts.tokenizer is None:
            return "structured output needs a tokenizer, and this model has none"
        try:
            if self._process is None or self._process.returncode is not None:
                self._process = await self._start()  # not this grammar's fault if it ended
            line = await asyncio.wait_for(
                _ask(self._process, Trial(wanted.kind, wanted.text)), WALL_SECONDS
            )
        except (TimeoutError, OSError):
            line = b""
        except BaseException:  # such as the client's leaving: its answer must not be the next one's
            await asyncio.shield(self.close())
            raise
        if line:
            return msgspec.json.decode(line, type=Verdict).fault
        await self.close()
        return (
            f"structured has a {wanted.kind} that takes more than {CPU_SECONDS:g} s or too much "
            "memory to compile; make it simpler"
        )

    async def _start(self) -> asyncio.subprocess.Process:
        tokenizer: Any = self._prompts.tokenizer
        vocab_size = self._prompts.vocab_size
        spec = await asyncio.to_thread(tokenizer_json, tokenizer, vocab_size)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "pageloom.serve.trial"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            limit=LINE_LIMIT,
        )
        assert process.stdin is not None
        ends = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        hello = Tokenizer(spec or "", vocab_size, ends)
        process.stdin.write(msgspec.json.encode(hello) + b"\n")
        return process


async def _ask(process: asyncio.subprocess.Process, trial: Trial) -> bytes:
    """Its answer; empty if it has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(msgspec.json.encode(trial) + b"\n")
    await process.stdin.drain()
    return await process.stdout.readline()
