"""The engine: requests in, chunks out, one step at a time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from pageloom.config import load_config
from pageloom.contract import EngineInfo, StepRecord
from pageloom.engine.detokenizer import Detokenizer
from pageloom.engine.open_request import OpenRequest
from pageloom.engine.outputs import CompletionChunk, RequestOutput
from pageloom.plugins import Plugins
from pageloom.runner.runner import ChunkResult, ModelRunner
from pageloom.scheduling import FinishReason, Planner, Request, SamplingParams, StepPlan

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


class Engine:
    """Serves requests with continuous batching. Not thread-safe; see `AsyncEngine` for that.

    Made by `from_config`. Several requests may be open at the same time, through `add_request`
    or several `stream` iterators; whoever calls `step` moves all of them.
    """

    def __init__(
        self,
        planner: Planner,
        runner: ModelRunner,
        tokenizer: PreTrainedTokenizerBase | None,
        plugins: Plugins,
        info: EngineInfo,
        *,
        eos_token_ids: frozenset[int],
        debug: bool = False,
    ) -> None:
        self.planner = planner
        self.runner = runner
        self.tokenizer = tokenizer
        self.plugins = plugins
        self.info = info
        self.eos_token_ids = eos_token_ids
        self.debug = debug
        self._open: dict[str, OpenRequest] = {}
        self._ids = count()
        self._steps = 0
        plugins.notify("engine_started", info=info)

    @classmethod
    def from_config(cls, path: str | Path, overrides: Sequence[str] = ()) -> Engine:
        """Build the engine that a YAML file describes; ``overrides`` are ``"section.key=value"``.

        Raises `ConfigError`, which lists every problem of the configuration, and other
        `PageloomError` if a model or plugin it names cannot be used.
        """
        from pageloom.engine.assemble import assemble

        return assemble(load_config(path, overrides))

    # -- requests ---------------------------------------------------------------------------

    @property
    def has_requests(self) -> bool:
        return self.planner.has_requests

    def add_request(
        self, prompt: Prompt, params: SamplingParams | None = None, **request: Any
    ) -> str:
        """Queue a request, as `open_request` does, and return its id; `step` returns its chunks."""
        return self.open_request(prompt, params, **request).request.request_id

    def open_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        user: str = "",
        metadata: Mapping[str, Any] | None = None,
    ) -> OpenRequest:
        """Queue a request and return the handle that its chunks gather in.

        ``prompt`` is text or token ids. ``priority`` (lower runs earlier), ``user`` (the tenant)
        and ``metadata`` are for the scheduling policy. Raises `ValueError`
        (`RequestTooLargeError` if the request could never run) and then changes nothing.
        """
        params = params or SamplingParams()
        text = prompt if isinstance(prompt, str) else None
        request = Request(
            request_id if request_id is not None else f"request-{next(self._ids)}",
            self.encode(prompt),
            params,
            arrival_time=self.planner.clock(),
            eos_token_ids=self.eos_token_ids,
            priority=priority,
            user=user,
            metadata=metadata or {},
        )
        vocab_size = self.runner.model.vocab_size
        params.check_vocab(vocab_size)
        if strangers := [t for t in request.prompt_token_ids if not 0 <= t < vocab_size]:
            raise ValueError(
                f"prompt token id {strangers[0]} is not in the vocabulary of {vocab_size} tokens"
            )
        if self.tokenizer is None and params.stop:
            raise ValueError("stop strings need a tokenizer, and this model has none")
        detokenizer = None
        if self.tokenizer is not None:
            detokenizer = Detokenizer(self.tokenizer, request.prompt_token_ids, params)
        self.planner.add(request)
        opened = OpenRequest(request, text, detokenizer)
        self._open[request.request_id] = opened
        return opened

    def abort(self, request_id: str) -> None:
        """End a request now; its blocks are free when this returns. Unknown ids are ignored, as
        the request may just have finished."""
        if opened := self._open.get(request_id):
            self._end(opened, "abort")

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt. Raises `ValueError` for text if the model has no tokenizer."""
        if not isinstance(prompt, str):
            return list(prompt)
        if self.tokenizer is None:
            raise ValueError("this model has no tokenizer; give the prompt as token ids")
        return list(self.tokenizer.encode(prompt))

    def render_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation by the model's chat template, up to where it answers."""
        if self.tokenizer is None or not self.tokenizer.chat_template:
            raise ValueError("this model has no chat template; use a plain prompt")
        text = self.tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
        )
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    # -- the loop ---------------------------------------------------------------------------

    def step(self) -> list[CompletionChunk]:
        """Run one step for whoever the scheduler picks, and return what it added.

        If the policy or the model raises, every open request ends with ``"error"``, no block is
        lost, and the error is raised.
        """
        started = time.monotonic()
        try:
            plan = self.planner.plan()
            results = self.runner.run(plan.chunks) if plan.chunks else []
            chunks = [chunk for result in results if (chunk := self._receive(result))]
        except Exception:
            for opened in list(self._open.values()):
                self._end(opened, "error")
            raise
        self._observe(plan, started)
        if self.debug and not self.has_requests:
            self.planner.check_integrity()
        return chunks

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts together and return them in order, one output per prompt.

        ``params`` is for all, or one per prompt. If one request cannot be served, none is.
        """
        many = _as_prompts(prompts)
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(many)
        if len(params) != len(many):
            raise ValueError(f"{len(many)} prompts but {len(params)} sampling params")
        opened: list[OpenRequest] = []
        try:
            for prompt, wanted in zip(many, params, strict=True):
                opened.append(self.open_request(prompt, wanted))
            while not all(request.finished for request in opened):
                self.step()
        finally:
            for request in opened:
                self.abort(request.request.request_id)
        return [request.collect() for request in opened]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **request: Any
    ) -> Iterator[CompletionChunk]:
        """Complete one prompt and yield chunks as they come. Closing the iterator aborts.

        Takes the keywords of `open_request`. The request is queued by the first ``next``.
        """
        opened = self.open_request(prompt, params, **request)
        try:
            while True:
                while opened.chunks:
                    yield opened.chunks.popleft()
                if opened.finished:
                    return
                self.step()
        finally:
            self.abort(opened.request.request_id)

    # -- inside a step ----------------------------------------------------------------------

    def _receive(self, result: ChunkResult) -> CompletionChunk | None:
        request = result.chunk.branch.request
        opened = self._open[request.request_id]
        self.planner.advance(result.chunk, result.token_id)
        chunk = opened.receive(result)
        if chunk and chunk.finish_reason:
            self._finish(opened, chunk.finish_reason)
        return chunk

    def _end(self, opened: OpenRequest, reason: FinishReason) -> None:
        opened.end(reason)
        self._finish(opened, reason)

    def _finish(self, opened: OpenRequest, reason: FinishReason) -> None:
        record = self.planner.finish(opened.request, reason)
        del self._open[record.request_id]
        self.plugins.notify("request_finished", record=record)

    def _observe(self, plan: StepPlan, started: float) -> None:
        self._steps += 1
        if not self.plugins.observes("step_finished"):
            return
        decodes = sum(chunk.is_decode for chunk in plan.chunks)
        pool = self.planner.pool
        record = StepRecord(
            step=self._steps,
            started=started,
            finished=time.monotonic(),
            num_running=len(self.planner.running),
            num_waiting=len(self.planner.waiting),
            prefill_tokens=plan.num_tokens - decodes,
            decode_tokens=decodes,
            recomputed_tokens=sum(chunk.num_recomputed for chunk in plan.chunks),
            preempted=len(plan.preempted),
            blocks_used=pool.num_used,
            blocks_total=pool.num_blocks,
            kv_tokens=sum(branch.num_computed for branch in self.planner.branches()),
            kv_slots=pool.num_used * self.info.block_size,
        )
        self.plugins.notify("step_finished", record=record)


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A text or a list of token ids is one prompt; a list of either is many."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [cast("Prompt", prompts)]
    return list(cast("Sequence[Prompt]", prompts))
