"""The engine: requests in, chunks out, one step at a time."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count, groupby
from pathlib import Path
from typing import Any

from pageloom.config import load_config
from pageloom.contract import EngineInfo, Executor
from pageloom.engine.detokenizer import Detokenizer
from pageloom.engine.guides import GuideCompiler
from pageloom.engine.memory_report import MemoryReport
from pageloom.engine.open_request import OpenRequest
from pageloom.engine.outputs import CompletionChunk, RequestOutput
from pageloom.engine.planned import ChunkResult
from pageloom.engine.prompts import Message, Prompt, PromptEncoder, as_prompts
from pageloom.engine.stepper import Stepper
from pageloom.engine.worker import EngineWorker
from pageloom.errors import PageloomError
from pageloom.plugins import Plugins
from pageloom.runner.runner import ModelRunner
from pageloom.scheduling import FinishReason, Planner, Request, SamplingParams
from pageloom.scheduling.beams import BeamSearch
from pageloom.scheduling.errors import RequestError
from pageloom.scheduling.structured import Guide

log = logging.getLogger(__name__)


class Engine:
    """Serves requests with continuous batching. Not thread-safe; see `AsyncEngine` for that.

    Made by `from_config`. Several requests may be open at the same time, by `add_request` or by
    several `stream` iterators; whoever steps moves all of them.
    """

    def __init__(
        self,
        planner: Planner,
        executor: Executor,
        prompts: PromptEncoder,
        plugins: Plugins,
        info: EngineInfo,
        memory: MemoryReport,
        *,
        eos_token_ids: frozenset[int],
        debug: bool = False,
    ) -> None:
        self.planner = planner
        self.executor = executor
        self.prompts = prompts
        self.plugins = plugins
        self.info = info
        self.memory = memory
        self.eos_token_ids = eos_token_ids
        self.debug = debug
        self.guides = GuideCompiler(prompts.tokenizer, prompts.vocab_size, eos_token_ids)
        self._open: dict[str, OpenRequest] = {}
        self._outbox: list[CompletionChunk] = []  # of requests that came by `add_request`
        self._ids = count()
        self._stepper = Stepper(planner, executor, plugins, info.block_size)
        plugins.notify("engine_started", info=info)

    @classmethod
    def from_config(
        cls, path: str | Path, overrides: Sequence[str] = (), *, by_server: bool = False
    ) -> Engine:
        """Build the engine that a YAML file describes; ``overrides`` are ``"section.key=value"``.
        Unless it is ``by_server``, which makes all replicas, a warning says that this is one.

        Raises `ConfigError`, which lists every problem of the configuration, and other
        `PageloomError` if a model or plugin it names cannot be used.
        """
        # What imports and loading make is there to stay: a million objects, which the garbage
        # collector would go through again and again.
        collecting = gc.isenabled()
        gc.disable()
        try:
            from pageloom.engine.assemble import assemble

            config = load_config(path, overrides)
            if config.parallel.most_replicas > 1 and not by_server:
                log.warning(
                    "parallel.replicas and max_replicas are for 'pageloom serve': this is 1 engine"
                )
            return assemble(config)
        finally:
            if collecting:
                gc.enable()

    # -- requests ---------------------------------------------------------------------------

    @property
    def has_requests(self) -> bool:
        return self.planner.has_requests

    def add_request(
        self, prompt: Prompt, params: SamplingParams | None = None, **request: Any
    ) -> str:
        """Queue a request, as `open_request` does, and return its id; `step` returns its chunks."""
        opened = self.open_request(prompt, params, deliver=self._outbox.append, **request)
        return opened.request.request_id

    def open_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        user: str = "",
        metadata: Mapping[str, Any] | None = None,
        cache_salt: str = "",
        guide: Guide | None = None,
        deliver: Callable[[CompletionChunk], None] | None = None,
    ) -> OpenRequest:
        """Queue a request and return its handle.

        ``prompt`` is text or token ids. ``priority`` (lower runs earlier), ``user`` (the tenant)
        and ``metadata`` are for the scheduling policy. Requests share cached prefixes only with
        those of the same ``cache_salt``. ``guide`` constrains the outputs; without one,
        that of ``params.structured`` is compiled here. Chunks gather in the handle, or go to
        ``deliver`` in the thread that steps. Raises `ValueError` (`RequestTooLargeError` if the
        request could never run) and then changes nothing.
        """
        params = params if params is not None else SamplingParams()
        _check_fields(params, request_id, priority, user, metadata, cache_salt)
        params.check_vocab(self.vocab_size)
        guide = self.compile_guide(params) if guide is None else guide
        request = Request(
            self._new_id() if request_id is None else request_id,
            self.prompts.encode(prompt),
            params,
            arrival_time=self.planner.clock(),
            eos_token_ids=self.eos_token_ids,
            priority=priority,
            user=user,
            metadata=metadata or {},
            cache_salt=cache_salt,
            guide=guide,
        )
        continuations = self.vocab_size - len(request.stop_token_ids)
        if params.beam_width is not None and continuations < params.beam_width:
            raise RequestError.of(
                "beam_width",
                f"is {params.beam_width}, but only {continuations} tokens of the vocabulary do not "
                "end an output; lower it, or name fewer stop_token_ids",
            )
        detokenizers: list[Detokenizer] = []
        if self.tokenizer is not None:
            ids = request.prompt_token_ids
            detokenizers = [Detokenizer(self.tokenizer, ids, params) for _ in range(params.n)]
        elif params.stop:
            raise RequestError.of("stop", "strings need a tokenizer, and this model has none")
        self.planner.add(request)
        text = prompt if isinstance(prompt, str) else None
        opened = OpenRequest(request, text, detokenizers, deliver)
        self._open[request.request_id] = opened
        return opened

    def compile_guide(self, params: SamplingParams) -> Guide | None:
        """What `open_request` takes as ``guide`` for one request. Any thread may call this, so that
        no step waits for a large grammar. Raises `ValueError` for what cannot be compiled."""
        return None if params.structured is None else self.guides.compile(params.structured)

    def abort(self, request_id: str) -> None:
        """End a request now; its blocks are free when this returns. Unknown ids are ignored, as
        the request may just have finished."""
        if opened := self._open.get(request_id):
            self._end(opened, "abort")

    def close(self, opened: OpenRequest) -> None:
        """`abort` by handle, for which it does not matter if the id is in use again."""
        if not opened.finished:
            self._end(opened, "abort")

    def reset_prefix_cache(self) -> None:
        """Forget which prefixes are in the cache, such as after a change of the weights. Open
        requests go on, and nobody finds what they have computed either."""
        self.planner.reset_prefix_cache()

    @property
    def tokenizer(self) -> Any:
        """The model's ``PreTrainedTokenizerFast``, or None."""
        return self.prompts.tokenizer

    @property
    def vocab_size(self) -> int:
        """Tokens that the model knows: ids are below."""
        return self.prompts.vocab_size

    @property
    def runner(self) -> ModelRunner:
        """What computes steps, with the model and its cache, where all that is in this process.
        Raises `PageloomError` where it is not."""
        if not isinstance(self.executor.worker, EngineWorker):
            raise PageloomError(
                "the model is not in the engine's process; set parallel.executor to local"
            )
        return self.executor.worker.runner

    def check_workers(self) -> None:
        """Raise `WorkerError` if a worker is known to be gone. For when there is nothing to step:
        `advance` finds out by itself. No request can be served any more then."""
        self.executor.check_workers()

    def shutdown(self) -> None:
        """End all requests and all workers. The engine is of no use any more."""
        for opened in list(self._open.values()):
            self._end(opened, "abort")
        self.executor.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; see `PromptEncoder.encode`."""
        return self.prompts.encode(prompt)

    def render_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation; see `PromptEncoder.render_chat`."""
        return self.prompts.render_chat(messages)

    # -- the loop ---------------------------------------------------------------------------

    def step(self) -> list[CompletionChunk]:
        """Run one step for whoever the scheduler picks.

        Returns what was added to requests that came by `add_request`, since the last call. If the
        policy or the model raises, every open request ends with ``"error"``, no block is lost,
        and the error is raised.
        """
        self.advance()
        chunks = self._outbox[:]
        self._outbox.clear()
        return chunks

    def advance(self) -> None:
        """`step`, for those who take their chunks elsewhere: nothing is taken from others."""
        try:
            step = self._stepper.run()
            for request, results in groupby(step.results, key=lambda r: r.chunk.branch.request):
                self._receive(request, list(results))
            self._stepper.complete(step)
        except (
            BaseException
        ) as error:  # such as KeyboardInterrupt: no half step may be gone on from
            for opened in list(self._open.values()):
                self._end(opened, "error")
            self._stepper.give_up(error)
            raise
        if self.debug and not self.has_requests:
            self.planner.check_integrity()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts together and return them in order, one output per prompt.

        ``params`` is for all, or one per prompt. If one request cannot be served, none is.
        """
        many = as_prompts(prompts)
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(many)
        if len(params) != len(many):
            raise ValueError(f"{len(many)} prompts but {len(params)} sampling params")
        opened: list[OpenRequest] = []
        try:
            for prompt, wanted in zip(many, params, strict=True):
                opened.append(self.open_request(prompt, wanted))
            for request in opened:
                while not request.finished:
                    self.advance()
        finally:
            for request in opened:
                self.close(request)
        return [request.collect() for request in opened]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **request: Any
    ) -> Iterator[CompletionChunk]:
        """Complete one prompt and yield chunks as they come. Closing the iterator aborts.

        Takes the keywords of `open_request`. The request is queued by the first ``next``.
        """
        opened = self.open_request(prompt, params, **request)
        try:
            yield from self.follow(opened)
        finally:
            self.close(opened)

    def follow(self, opened: OpenRequest) -> Iterator[CompletionChunk]:
        """The chunks of an open request up to its last, stepping as needed."""
        while True:
            while opened.chunks:
                yield opened.chunks.popleft()
            if opened.finished:
                return
            self.advance()

    # -- inside a step ----------------------------------------------------------------------

    def _receive(self, request: Request, results: Sequence[ChunkResult]) -> None:
        opened = self._open.get(request.request_id)
        if opened is None or opened.request is not request:
            return  # an observer of this step aborted it
        for result in results:
            if result.failure is not None:
                log.error("request %s ends: %s", request.request_id, result.failure)
                self._end(opened, "error")
                return
            opened.score_prompt(result.prompt_logprobs)
        if request.beams is not None:
            self._receive_candidates(opened, request.beams, results)
        else:
            for result in results:
                if not opened.finished:  # whoever got the chunk before may have aborted it
                    self._receive_draws(opened, result)

    def _receive_draws(self, opened: OpenRequest, result: ChunkResult) -> None:
        request, drawn = opened.request, result.draws
        branches = self.planner.advance(result.chunk, [draw.token_id for draw in drawn])
        for branch, draw in zip(branches, drawn, strict=True):
            if opened.finished:
                return
            chunk = opened.receive(branch, draw)
            if chunk.finish_reason and len(request.branches) > 1:
                self.planner.end(branch)
            elif chunk.finish_reason:
                self._finish(opened, chunk.finish_reason)
            self._deliver(opened, chunk)

    def _receive_candidates(
        self, opened: OpenRequest, beams: BeamSearch, results: Sequence[ChunkResult]
    ) -> None:
        candidates = [result.candidates for result in results if result.chunk.draws]
        self.planner.advance_beams([result.chunk for result in results], candidates)
        if beams.done:
            self._finish(opened, beams.results()[0].finish_reason)
            for chunk in opened.receive_beams():
                self._deliver(opened, chunk)

    def _deliver(self, opened: OpenRequest, chunk: CompletionChunk) -> None:
        """Hand a chunk over; whoever sees the last one can rely on the blocks being free."""
        if not opened.send(chunk) and not opened.finished:
            self._finish(opened, "abort")

    def _end(self, opened: OpenRequest, reason: FinishReason) -> None:
        self._finish(opened, reason)
        opened.end(reason)

    def _finish(self, opened: OpenRequest, reason: FinishReason) -> None:
        record = self.planner.finish(opened.request, reason)
        del self._open[record.request_id]
        self.plugins.notify("request_finished", record=record)

    def _new_id(self) -> str:
        return next(name for n in self._ids if (name := f"request-{n}") not in self.planner)


def _check_fields(
    params: object,
    request_id: object,
    priority: object,
    user: object,
    metadata: object,
    cache_salt: object,
) -> None:
    """Raise `ValueError` for what a scheduling policy or an observer would stumble over."""
    if not isinstance(params, SamplingParams):
        raise ValueError(f"params must be SamplingParams, not {type(params).__name__}")
    if request_id is not None and not (isinstance(request_id, str) and request_id):
        raise ValueError(f"request_id must be a text that is not empty, not {request_id!r}")
    if not isinstance(priority, int) or not -(2**31) <= priority < 2**31:
        raise RequestError.of("priority", f"must be an integer of 32 bits, not {priority!r}")
    for name, value in (("user", user), ("cache_salt", cache_salt)):
        if not isinstance(value, str):
            raise RequestError.of(name, f"must be a text, not {value!r}")
    if not isinstance(metadata, Mapping | None):
        raise ValueError(f"metadata must be a mapping, not {type(metadata).__name__}")
