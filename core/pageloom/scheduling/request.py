"""Requests and their branches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from secrets import token_bytes
from types import MappingProxyType
from typing import Any, Literal

from pageloom.memory import BlockKey, BlockPool, BlockTable, block_key, root_hash
from pageloom.scheduling.beams import BeamSearch
from pageloom.scheduling.params import SamplingParams
from pageloom.scheduling.structured import Guide

FinishReason = Literal["stop", "length", "abort", "error"]


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Branch:
    """One sequence of a request: the shared prompt and its own output, and where its KV is."""

    __slots__ = (
        "_keys",
        "guide",
        "index",
        "num_computed",
        "output_token_ids",
        "recompute_until",
        "request",
        "table",
    )

    def __init__(
        self, request: Request, index: int, table: BlockTable, guide: Guide | None = None
    ) -> None:
        self.request = request
        self.index = index
        self.table = table
        self.guide = guide  # of its output, with which it goes wherever that goes
        self.output_token_ids: list[int] = []
        self.num_computed = 0  # tokens whose KV is in the table's blocks
        self.recompute_until = 0  # tokens that were computed before a preemption dropped them
        self._keys: list[BlockKey] = []  # of the first blocks, as far as somebody asked

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_pending(self) -> int:
        return self.num_tokens - self.num_computed

    def fork(self, index: int) -> Branch:
        """Another branch with the same tokens in the same blocks."""
        guide = self.guide.fork() if self.guide is not None else None
        fork = Branch(self.request, index, self.table.fork(), guide)
        fork.output_token_ids = self.output_token_ids[:]
        fork.num_computed = self.num_computed
        fork.recompute_until = self.recompute_until
        fork._keys = self._keys[:]
        return fork

    def append(self, token_id: int) -> None:
        """Take in the next token of the output."""
        self.output_token_ids.append(token_id)
        if self.guide is not None:
            self.guide.advance(token_id)

    def drop(self) -> None:
        """Give the blocks back; everything computed so far is pending again."""
        self.table.release()
        self.recompute_until = max(self.recompute_until, self.num_computed)
        self.num_computed = 0

    def tokens(self, start: int, stop: int) -> Sequence[int]:
        """Token ids at positions ``start .. stop - 1``, prompt and output as one sequence."""
        prompt = self.request.prompt_token_ids
        if start >= len(prompt):
            return self.output_token_ids[start - len(prompt) : stop - len(prompt)]
        if stop <= len(prompt):
            return prompt[start:stop]
        return [*prompt[start:], *self.output_token_ids[: stop - len(prompt)]]

    def key(self, index: int) -> BlockKey:
        """What the block ``index`` of the table holds once it is full. Its tokens must be known."""
        size = self.table.block_size
        for i in range(len(self._keys), index + 1):
            parent = self._keys[-1].hash if i else self.request.root_hash
            self._keys.append(block_key(parent, self.tokens(i * size, (i + 1) * size)))
        return self._keys[index]


class Request:
    """What a client asked for and how far it has come. Only the planner changes its state."""

    __slots__ = (
        "arrival_time",
        "beams",
        "branches",
        "cached_tokens",
        "eos_token_ids",
        "finish_reason",
        "finished_tokens",
        "first_scheduled_time",
        "first_token_time",
        "guide",
        "max_tokens",
        "metadata",
        "num_preemptions",
        "params",
        "priority",
        "prompt_token_ids",
        "request_id",
        "root_hash",
        "seats",
        "status",
        "stop_token_ids",
        "swapped",
        "user",
        "view",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        arrival_time: float,
        eos_token_ids: frozenset[int] = frozenset(),
        priority: int = 0,
        user: str = "",
        metadata: Mapping[str, Any] = MappingProxyType({}),
        cache_salt: str = "",
        guide: Guide | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.arrival_time = arrival_time
        self.eos_token_ids = eos_token_ids
        self.stop_token_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            self.stop_token_ids |= eos_token_ids
        self.priority = priority
        self.user = user
        self.metadata = MappingProxyType(dict(metadata))
        if guide is not None and params.beam_width is not None:
            raise ValueError("a guide does not go with beam_width; leave out either")
        self.guide = guide  # at the beginning of an output
        self.max_tokens = 0  # set on arrival, when it is known what there is room for
        self.root_hash = root_hash(cache_salt)
        self.seats = params.beam_width or params.n  # branches that it has or will have
        self.branches: list[Branch] = []  # that have not ended
        self.beams: BeamSearch | None = None
        self.finished_tokens = 0  # output of branches that have ended
        self.status = Status.WAITING
        self.swapped = False  # whether its blocks are in the host pool
        self.cached_tokens = 0
        self.num_preemptions = 0
        self.first_scheduled_time: float | None = None
        self.first_token_time: float | None = None
        self.finish_reason: FinishReason | None = None
        self.view = View(self)

    def open(self, pool: BlockPool, block_size: int, max_tokens: int) -> None:
        """Make the first branch; its table is empty until the request is admitted."""
        self.max_tokens = max_tokens
        self.branches = [Branch(self, 0, BlockTable(pool, block_size), self.guide)]
        if self.params.beam_width is not None:
            self.beams = BeamSearch(
                self.params.beam_width,
                length_penalty=self.params.length_penalty,
                early_stopping=self.params.early_stopping,
                max_tokens=max_tokens,
                min_tokens=self.params.min_tokens,
                eos_token_ids=self.eos_token_ids if not self.params.ignore_eos else (),
                stop_token_ids=self.params.stop_token_ids,
                num_return=self.params.n,
            )

    def fork(self) -> None:
        """Make the branches of parallel sampling, once the prompt is computed."""
        first = self.branches[0]
        self.branches += [first.fork(index) for index in range(1, self.seats)]

    def isolate(self) -> None:
        """Let nobody find what was computed so far, or what will be computed from it."""
        self.root_hash = token_bytes(32)
        for branch in self.branches:
            branch._keys.clear()

    def reorder(self, choices: Sequence[tuple[int, int]]) -> None:
        """Make each (branch, token id) of ``choices`` a branch; those not chosen end."""
        parents, self.branches = self.branches, []
        first: dict[int, int] = {}  # the choice by which a parent lives on
        for index, (chosen, _) in enumerate(choices):
            lives_on = first.setdefault(chosen, index) == index
            self.branches.append(parents[chosen] if lives_on else parents[chosen].fork(index))
        for index, (branch, (_, token_id)) in enumerate(zip(self.branches, choices, strict=True)):
            branch.index = index
            branch.append(token_id)
        for chosen, parent in enumerate(parents):
            if chosen not in first:
                parent.table.release()

    @property
    def output_tokens(self) -> int:
        """Of all branches, those that have ended included."""
        live = sum(len(branch.output_token_ids) for branch in self.branches)
        return self.finished_tokens + live

    @property
    def returned_tokens(self) -> int:
        """Output tokens that its client gets: of beams, those of the best."""
        if self.beams is None:
            return self.output_tokens
        returned = self.beams.results() if self.beams.done else ()
        return sum(len(output.token_ids) for output in returned)

    def stop_reason_of(self, branch: Branch) -> FinishReason | None:
        """Why a branch that is no beam ends with the token it got last, or None if it goes on."""
        count = len(branch.output_token_ids)
        last = branch.output_token_ids[-1]
        if last in self.stop_token_ids and count >= self.params.min_tokens:
            return "stop"
        if branch.guide is not None and branch.guide.finished:
            return "stop"
        return "length" if count >= self.max_tokens else None


class View:
    """The `pageloom.contract.RequestView` of a request: reads through, changes nothing."""

    __slots__ = ("_request",)

    def __init__(self, request: Request) -> None:
        self._request = request

    def __repr__(self) -> str:
        counts = f"{self.computed_tokens} computed, {self.pending_tokens} pending"
        return f"<request {self.request_id}: {counts}>"

    @property
    def request_id(self) -> str:
        return self._request.request_id

    @property
    def arrival_time(self) -> float:
        return self._request.arrival_time

    @property
    def priority(self) -> int:
        return self._request.priority

    @property
    def user(self) -> str:
        return self._request.user

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self._request.metadata

    @property
    def num_branches(self) -> int:
        return self._request.seats

    @property
    def prompt_tokens(self) -> int:
        return len(self._request.prompt_token_ids)

    @property
    def cached_tokens(self) -> int:
        return self._request.cached_tokens

    @property
    def computed_tokens(self) -> int:
        if self._request.swapped:
            return 0
        return sum(branch.num_computed for branch in self._request.branches)

    @property
    def output_tokens(self) -> int:
        return self._request.output_tokens

    @property
    def max_tokens(self) -> int:
        return self._request.max_tokens

    @property
    def pending_tokens(self) -> int:
        return sum(branch.num_pending for branch in self._request.branches)

    @property
    def is_prefill(self) -> bool:
        return any(branch.num_pending > 1 for branch in self._request.branches)

    @property
    def preemptions(self) -> int:
        return self._request.num_preemptions
