"""The plan of one engine step: what a policy may do to requests, and the limits it works in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pageloom.contract import Refusal, RequestView
from pageloom.memory import BlockPool
from pageloom.scheduling.request import Branch, Request, Status, View


@dataclass(frozen=True, slots=True)
class Limits:
    max_num_seqs: int  # branches that run at the same time
    max_num_batched_tokens: int  # tokens computed in one step
    max_model_len: int  # tokens of prompt and output
    block_size: int  # tokens
    enable_chunked_prefill: bool = True


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens ``start .. start + num_tokens - 1`` of a branch, to be computed in this step."""

    branch: Branch
    start: int
    num_tokens: int
    samples: bool  # whether this is all that was pending, so that the next token can be sampled

    @property
    def stop(self) -> int:
        return self.start + self.num_tokens

    @property
    def is_decode(self) -> bool:
        """Whether it is one new token's turn, rather than prompt or what is computed again."""
        prompt = len(self.branch.request.prompt_token_ids)
        return self.num_tokens == 1 and self.start >= max(prompt, self.branch.recompute_until)

    @property
    def num_recomputed(self) -> int:
        """Tokens of this chunk that were computed before, until a preemption dropped them."""
        return max(0, min(self.stop, self.branch.recompute_until) - self.start)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step does. Blocks are taken and given back already; queues have yet to follow."""

    chunks: tuple[Chunk, ...]
    admitted: tuple[Request, ...]
    preempted: tuple[Request, ...]

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)


class DraftPlan:
    """Implements `pageloom.contract.PlanView`: what a policy fills in, once.

    Blocks are taken and given back as the policy decides, so what it reads is always true.
    Requests change their queue only when the planner commits the plan, so a policy may iterate
    over its view while it plans.
    """

    def __init__(
        self,
        pool: BlockPool,
        limits: Limits,
        running: Mapping[str, Request],
        waiting: Mapping[str, Request],
    ) -> None:
        self._pool = pool
        self._limits = limits
        self._running = running
        self._waiting = waiting
        self._tokens_left = limits.max_num_batched_tokens
        self._seats_left = limits.max_num_seqs - sum(len(r.branches) for r in running.values())
        self._refusal: Refusal | None = None
        self._chunks: list[Chunk] = []
        self._admitted: list[Request] = []
        self._preempted: list[Request] = []
        self._settled: set[Request] = set()
        self._closed = False

    def close(self) -> StepPlan:
        """End the planning: from now on every call of the policy's raises `ValueError`."""
        self._closed = True
        return StepPlan(tuple(self._chunks), tuple(self._admitted), tuple(self._preempted))

    @property
    def tokens_left(self) -> int:
        return self._tokens_left

    @property
    def seats_left(self) -> int:
        return self._seats_left

    @property
    def blocks_free(self) -> int:
        return self._pool.num_free

    @property
    def refusal(self) -> Refusal | None:
        return self._refusal

    def run(self, request: RequestView, max_tokens: int | None = None) -> int:
        """See `PlanView.run`."""
        target = self._open(request)
        if max_tokens is not None and (not isinstance(max_tokens, int) or max_tokens < 1):
            raise ValueError(f"max_tokens must be an integer of at least 1, not {max_tokens!r}")
        branch = target.branches[0]
        waiting = target.status is Status.WAITING
        granted = self._affordable(branch.num_pending, max_tokens)
        if waiting and self._seats_left < len(target.branches):
            return self._refuse("seats")
        if not granted:
            return self._refuse("tokens")
        end = branch.num_computed + granted
        if branch.table.missing(end) > self._pool.num_free:
            return self._refuse("blocks")

        branch.table.grow(end)
        samples = granted == branch.num_pending
        self._chunks.append(Chunk(branch, branch.num_computed, granted, samples))
        self._tokens_left -= granted
        self._settled.add(target)
        if waiting:
            self._seats_left -= len(target.branches)
            self._admitted.append(target)
        self._refusal = None
        return granted

    def preempt(self, request: RequestView) -> None:
        """See `PlanView.preempt`."""
        target = self._open(request)
        if target.status is not Status.RUNNING:
            raise ValueError(f"request {target.request_id} is not running")
        for branch in target.branches:
            branch.drop()
        target.num_preemptions += 1
        self._seats_left += len(target.branches)
        self._preempted.append(target)
        self._settled.add(target)

    def preemptible(self, request: RequestView) -> bool:
        """See `PlanView.preemptible`."""
        target = self._request_of(request)
        return target.status is Status.RUNNING and target not in self._settled

    def _affordable(self, pending: int, max_tokens: int | None) -> int:
        """How much of ``pending`` the token budget and the policy's own limit leave."""
        most = min(pending, self._tokens_left, max_tokens or pending)
        whole = pending > 1 and not self._limits.enable_chunked_prefill
        return 0 if whole and most < pending else most

    def _open(self, view: RequestView) -> Request:
        """The request behind the view, if this plan has not decided over it yet."""
        target = self._request_of(view)
        if target in self._settled:
            raise ValueError(
                f"request {target.request_id} already ran or was preempted in this step"
            )
        return target

    def _request_of(self, view: RequestView) -> Request:
        if self._closed:
            raise ValueError("this plan is closed: it is valid during one call of schedule")
        if isinstance(view, View):
            request = view._request
            queue = self._running if request.status is Status.RUNNING else self._waiting
            if queue.get(request.request_id) is request:
                return request
        raise ValueError(f"{view!r} is not a request of this view")

    def _refuse(self, why: Refusal) -> Literal[0]:
        self._refusal = why
        return 0
