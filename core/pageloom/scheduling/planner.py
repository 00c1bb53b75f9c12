"""From queued requests to a step plan, and from sampled tokens back to requests."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from pageloom.contract import RequestRecord, RequestView, Scheduler
from pageloom.memory import BlockPool, IntegrityError, blocks_for, check_integrity
from pageloom.scheduling.plan import Chunk, DraftPlan, Limits, StepPlan
from pageloom.scheduling.request import Branch, FinishReason, Request, Status


class RequestTooLargeError(ValueError):
    """A request that could never run: longer than the model, the pool or a step allows."""


class PolicyError(RuntimeError):
    """The scheduling policy raised, or made no progress. Names the policy."""


@dataclass(frozen=True, slots=True)
class QueueView:
    """Implements `pageloom.contract.SchedulerView`."""

    now: float
    running: tuple[RequestView, ...]
    waiting: WaitingView


class WaitingView:
    """The waiting requests in order, read-only and lazy: the queue may be very long."""

    __slots__ = ("_waiting",)

    def __init__(self, waiting: Mapping[str, Request]) -> None:
        self._waiting = waiting

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[RequestView]:
        return (request.view for request in self._waiting.values())

    def __contains__(self, view: object) -> bool:
        return getattr(view, "request_id", None) in self._waiting


class Planner:
    """Owns every open request and every block; the only one who moves them.

    A request is added, planned for step after step, advanced by what the step sampled, and
    finished. Not thread-safe: it belongs to the engine's thread.
    """

    # A plan that does nothing while there are requests is a policy that is stuck. One is forgiven:
    # it may have been made in the moment before a request came.
    MAX_EMPTY_PLANS = 2
    # So many preemptions per seat without one token that was not computed before are a policy
    # that evicts and readmits in circles.
    MAX_PREEMPTIONS_PER_SEAT = 4

    def __init__(
        self,
        scheduler: Scheduler,
        pool: BlockPool,
        limits: Limits,
        *,
        policy: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.pool = pool
        self.limits = limits
        self.policy = policy
        self.clock = clock
        # An OrderedDict and not a dict: taking from a dict's head again and again is quadratic.
        self.waiting: OrderedDict[str, Request] = OrderedDict()
        self.running: dict[str, Request] = {}
        self._empty_plans = 0
        self._fruitless_preemptions = 0

    def __contains__(self, request_id: object) -> bool:
        return request_id in self.running or request_id in self.waiting

    @property
    def has_requests(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, request: Request) -> None:
        """Queue a request. Raises `RequestTooLargeError` if it could never run, and `ValueError`
        if its id is taken or its prompt is empty; then nothing is changed."""
        if request.request_id in self:
            raise ValueError(f"request id {request.request_id!r} is in use")
        request.open(self.pool, self.limits.block_size, self._max_tokens(request))
        self.waiting[request.request_id] = request

    def plan(self) -> StepPlan:
        """Let the policy plan a step, and move the requests that it admitted or preempted.

        Raises `PolicyError` if the policy raises or is stuck. No block is lost then, and every
        request can still be finished.
        """
        draft = DraftPlan(self.pool, self.limits, self.running, self.waiting)
        view = QueueView(
            now=self.clock(),
            running=tuple(request.view for request in self.running.values()),
            waiting=WaitingView(self.waiting),
        )
        try:
            self.scheduler.schedule(view, draft)
        except Exception as error:
            raise PolicyError(
                f"scheduling policy {self.policy!r} failed: {type(error).__name__}: {error}"
            ) from error
        finally:
            plan = draft.close()
            self._commit(plan, view.now)
        self._detect_stall(plan)
        return plan

    def advance(self, chunk: Chunk, token_id: int | None) -> None:
        """Record that a chunk was computed, and the token sampled from it (None if none was)."""
        branch = chunk.branch
        branch.num_computed = chunk.stop
        if token_id is not None:
            branch.output_token_ids.append(token_id)
            if branch.request.first_token_time is None:
                branch.request.first_token_time = self.clock()

    def finish(self, request: Request, reason: FinishReason) -> RequestRecord:
        """End a request in whatever state it is, free its blocks and tell what became of it."""
        if request.status is Status.FINISHED:
            raise ValueError(f"request {request.request_id} is finished already")
        self.running.pop(request.request_id, None)
        self.waiting.pop(request.request_id, None)
        for branch in request.branches:
            branch.table.release()
        request.status = Status.FINISHED
        request.finish_reason = reason
        return RequestRecord(
            request_id=request.request_id,
            user=request.user,
            finish_reason=reason,
            prompt_tokens=len(request.prompt_token_ids),
            cached_tokens=request.num_cached,
            output_tokens=sum(len(branch.output_token_ids) for branch in request.branches),
            preemptions=request.num_preemptions,
            arrived=request.arrival_time,
            first_scheduled=request.first_scheduled_time,
            first_token=request.first_token_time,
            finished=self.clock(),
        )

    def branches(self) -> Iterator[Branch]:
        """Branches of running requests: all that hold blocks."""
        return (branch for request in self.running.values() for branch in request.branches)

    def check_integrity(self) -> None:
        """Raise `pageloom.memory.IntegrityError` if a block is leaked or counted wrongly, or if a
        branch has computed more than its blocks hold."""
        branches = [
            branch
            for queue in (self.running, self.waiting)
            for request in queue.values()
            for branch in request.branches
        ]
        check_integrity(self.pool, [branch.table for branch in branches])
        for branch in branches:
            if branch.num_computed > branch.table.capacity:
                raise IntegrityError(
                    f"request {branch.request.request_id} has {branch.num_computed} tokens "
                    f"computed, but its blocks hold {branch.table.capacity}"
                )

    def _commit(self, plan: StepPlan, now: float) -> None:
        for request in plan.admitted:
            del self.waiting[request.request_id]
            self.running[request.request_id] = request
            request.status = Status.RUNNING
            if request.first_scheduled_time is None:
                request.first_scheduled_time = now
        for request in plan.preempted:
            del self.running[request.request_id]
            self.waiting[request.request_id] = request
            self.waiting.move_to_end(request.request_id, last=False)
            request.status = Status.WAITING

    def _detect_stall(self, plan: StepPlan) -> None:
        idle = not (plan.chunks or plan.preempted) and self.has_requests
        self._empty_plans = self._empty_plans + 1 if idle else 0
        if any(chunk.stop > chunk.branch.recompute_until for chunk in plan.chunks):
            self._fruitless_preemptions = 0
        else:
            self._fruitless_preemptions += len(plan.preempted)
        if self._empty_plans >= self.MAX_EMPTY_PLANS:
            what = f"{self._empty_plans} steps in a row did nothing"
        elif self._fruitless_preemptions > self.MAX_PREEMPTIONS_PER_SEAT * self.limits.max_num_seqs:
            what = f"{self._fruitless_preemptions} preemptions did not lead to one new token"
        else:
            return
        self._empty_plans = self._fruitless_preemptions = 0
        raise PolicyError(
            f"scheduling policy {self.policy!r} makes no progress: {what}, with "
            f"{len(self.running)} requests running, {len(self.waiting)} waiting and "
            f"{self.pool.num_free} of {self.pool.num_blocks} blocks free"
        )

    def _max_tokens(self, request: Request) -> int:
        """Most output tokens of a request: what it asks for, or else all that there is room for.

        The last token is returned and never computed, so it needs no room but in the model.
        """
        limits, prompt = self.limits, len(request.prompt_token_ids)
        name = f"request {request.request_id}"
        if not prompt:
            raise ValueError(f"{name} has an empty prompt; give at least one token")
        if prompt >= limits.max_model_len:
            raise RequestTooLargeError(
                f"{name} has a prompt of {prompt} tokens, but max_model_len is "
                f"{limits.max_model_len} and must leave room for one output token"
            )
        asked, room = request.params.max_tokens, limits.max_model_len - prompt
        output = min(asked or 1, room)  # what it needs at least
        computed = prompt + output - 1
        needed = blocks_for(computed, limits.block_size)
        if needed > self.pool.num_blocks:
            raise RequestTooLargeError(
                f"{name} may need {needed} KV blocks ({prompt} prompt + {output} output tokens, "
                f"{limits.block_size} per block), but the pool has {self.pool.num_blocks}; "
                f"shorten it, or raise kv_cache.memory (or kv_cache.num_blocks)"
            )
        if not limits.enable_chunked_prefill and computed > limits.max_num_batched_tokens:
            raise RequestTooLargeError(
                f"{name} may have to compute {computed} tokens in one step, but "
                f"max_num_batched_tokens is {limits.max_num_batched_tokens} and "
                f"enable_chunked_prefill is off; shorten it, or change one of the two"
            )
        if asked is not None:
            return output
        most = self.pool.num_blocks * limits.block_size
        if not limits.enable_chunked_prefill:
            most = min(most, limits.max_num_batched_tokens)
        return min(room, most + 1 - prompt)
