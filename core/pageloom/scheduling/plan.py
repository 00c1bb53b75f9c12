"""The plan of one engine step: what a policy may do to requests, and the limits it works in."""

from __future__ import annotations

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
        return self.num_tokens == 1 and self.start >= len(self.branch.request.prompt_token_ids)

    @property
    def num_recomputed(self) -> int:
        """Tokens of this chunk that were computed before, until a preemption dropped them."""
        return max(0, min(self.stop, self.branch.recompute_until) - self.start)


class StepPlan:
    """Implements `pageloom.contract.PlanView`.

    Blocks are taken and given back as the policy decides, so what it reads is always true.
    Requests change their queue only when the planner commits the plan, so a policy may iterate
    over its view while it plans.
    """

    def __init__(self, pool: BlockPool, limits: Limits, seats_left: int) -> None:
        self._pool = pool
        self._limits = limits
        self.tokens_left = limits.max_num_batched_tokens
        self.seats_left = seats_left
        self.refusal: Refusal | None = None
        self.chunks: list[Chunk] = []
        self.admitted: list[Request] = []
        self.preempted: list[Request] = []
        self._settled: set[Request] = set()

    @property
    def blocks_free(self) -> int:
        return self._pool.num_free

    @property
    def num_tokens(self) -> int:
        """Tokens granted so far."""
        return self._limits.max_num_batched_tokens - self.tokens_left

    def run(self, request: RequestView, max_tokens: int | None = None) -> int:
        """See `PlanView.run`."""
        target = self._open(request)
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {max_tokens}")
        branch = target.branches[0]
        waiting = target.status is Status.WAITING
        granted = self._affordable(branch.num_pending, max_tokens)
        if waiting and self.seats_left < len(target.branches):
            return self._refuse("seats")
        if not granted:
            return self._refuse("tokens")
        end = branch.num_computed + granted
        if branch.table.missing(end) > self._pool.num_free:
            return self._refuse("blocks")

        branch.table.grow(end)
        samples = granted == branch.num_pending
        self.chunks.append(Chunk(branch, branch.num_computed, granted, samples))
        self.tokens_left -= granted
        self._settled.add(target)
        if waiting:
            self.seats_left -= len(target.branches)
            self.admitted.append(target)
        self.refusal = None
        return granted

    def preempt(self, request: RequestView) -> None:
        """See `PlanView.preempt`."""
        target = self._open(request)
        if target.status is not Status.RUNNING:
            raise ValueError(f"request {target.request_id} is not running")
        for branch in target.branches:
            branch.drop()
        target.num_preemptions += 1
        self.seats_left += len(target.branches)
        self.preempted.append(target)
        self._settled.add(target)

    def preemptible(self, request: RequestView) -> bool:
        """See `PlanView.preemptible`."""
        target = _request_of(request)
        return target.status is Status.RUNNING and target not in self._settled

    def _affordable(self, pending: int, max_tokens: int | None) -> int:
        """How much of ``pending`` the token budget and the policy's own limit leave."""
        if pending > 1 and not self._limits.enable_chunked_prefill:
            return pending if pending <= self.tokens_left else 0
        return min(pending, self.tokens_left, max_tokens or pending)

    def _open(self, request: RequestView) -> Request:
        """The request behind the view, if this plan has not decided over it yet."""
        target = _request_of(request)
        if target.status is Status.FINISHED:
            raise ValueError(f"request {target.request_id} is finished")
        if target in self._settled:
            raise ValueError(
                f"request {target.request_id} already ran or was preempted in this step"
            )
        return target

    def _refuse(self, why: Refusal) -> Literal[0]:
        self.refusal = why
        return 0


def _request_of(view: RequestView) -> Request:
    if not isinstance(view, View):
        raise ValueError(f"{view!r} is not a request of this view")
    return view._request
