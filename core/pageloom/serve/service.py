"""What the endpoints share: the engine, the tokenizer, and the server's limits."""

from __future__ import annotations

import asyncio
import hashlib
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.metadata import version
from typing import Any

from pageloom.config.schema import ServerConfig
from pageloom.engine.prompts import Prompt, PromptEncoder
from pageloom.scheduling import SamplingParams
from pageloom.serve.calls import ToolStyle, ToolUse
from pageloom.serve.engines import Engines
from pageloom.serve.errors import APIError, draining, engine_died, overloaded, too_long, too_many
from pageloom.serve.generation import Generation, invalid, unfit
from pageloom.serve.grammars import Grammars
from pageloom.serve.logprobs import TokenTexts
from pageloom.serve.protocol import GenerationFields
from pageloom.serve.structured import refused


@dataclass
class Service:
    """One engine and what is said about it. Used by the tasks of one event loop."""

    config: ServerConfig
    client: Engines
    prompts: PromptEncoder
    model: str  # the name that clients use
    root: str  # where the model came from
    tool_style: ToolStyle | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False

    @cached_property
    def fingerprint(self) -> str:
        """Changes with whatever may change the answer to the same request with the same seed."""
        info = replace(self.client.info, num_blocks=0)  # which may differ from start to start
        said = repr((version("pageloom"), info))
        return f"fp_{hashlib.sha256(said.encode()).hexdigest()[:12]}"

    @cached_property
    def texts(self) -> TokenTexts:
        return TokenTexts(self.prompts.tokenizer)

    @cached_property
    def grammars(self) -> Grammars:
        return Grammars(self.prompts)

    async def check_structured(self, fields: GenerationFields) -> None:
        """Raises `APIError` if the engine could not use the grammar that ``fields`` ask for."""
        if wanted := fields.structured():
            try:
                await self.grammars.check(wanted[1])
            except ValueError as error:
                raise refused(wanted[0], error) from error

    async def check_calls(self, use: ToolUse) -> None:
        """Raises `APIError` if the engine could not see to it that a tool is called."""
        if use.required is not None:
            try:
                await self.grammars.check(use.required)
            except ValueError as error:
                raise refused("tools", error) from error

    def card(self) -> dict[str, Any]:
        """The model, as ``/v1/models`` shows it."""
        return {
            "id": self.model,
            "object": "model",
            "created": self.created,
            "owned_by": "pageloom",
            "root": self.root,
            "parent": None,
            "max_model_len": self.client.info.max_model_len,
        }

    def check_model(self, name: str | None) -> None:
        """Raises `APIError` for a model that is not served here."""
        if name is not None and name != self.model:
            raise APIError(
                f"the model {name!r} does not exist; there is {self.model!r}",
                404,
                param="model",
                code="model_not_found",
            )

    async def encode(
        self, prompts: Sequence[Prompt], *, add_special_tokens: bool = True, param: str = "prompt"
    ) -> list[list[int]]:
        """Token ids of each prompt, of a text with the special tokens around it or without.
        Tokenizing runs in threads, so that nobody waits for it."""

        def encode(prompt: Prompt) -> list[int]:
            if isinstance(prompt, str) and not add_special_tokens:
                return self.prompts.encode_plain(prompt)
            return self.prompts.encode(prompt)

        try:
            return [await asyncio.to_thread(encode, prompt) for prompt in prompts]
        except ValueError as error:
            raise unfit(error, param) from error

    def generate(
        self, prompts: Sequence[list[int]], params: SamplingParams, fields: GenerationFields
    ) -> Generation:
        """Send a request to the engine for each prompt. Raises `APIError` if there is no engine,
        or no room for more."""
        if self.draining:
            raise draining()
        if not self.client.is_alive:
            raise engine_died()
        for prompt in prompts:  # before it travels to the engine, which would refuse it
            if len(prompt) >= self.client.info.max_model_len:
                field = "prompt" if "prompt" in type(fields).model_fields else "messages"
                raise too_long(len(prompt), self.client.info.max_model_len, field)
        waiting, most = self.client.num_waiting, self.config.max_waiting
        if most is not None and len(prompts) > most:
            raise too_many(len(prompts), most)
        if most is not None and waiting + len(prompts) > most:
            raise overloaded(waiting)
        try:
            params.check_vocab(self.prompts.vocab_size)
        except ValueError as error:
            raise invalid(error) from error
        return Generation(
            [
                self.client.generate(
                    prompt,
                    params,
                    priority=fields.priority,
                    user=fields.user or "",
                    cache_salt=fields.cache_salt or "",
                )
                for prompt in prompts
            ]
        )

    def answer_id(self, prefix: str) -> str:
        return f"{prefix}-{uuid.uuid4().hex}"

    def head(self, kind: str, answer_id: str) -> dict[str, Any]:
        """What every answer and every chunk of a stream begins with."""
        return {
            "id": answer_id,
            "object": kind,
            "created": int(time.time()),
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }
