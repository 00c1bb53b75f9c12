"""From queued requests to a step plan, and from sampled tokens back to requests."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from pageloom.contract import RequestRecord, RequestView, Scheduler
from pageloom.memory import BlockPool, IntegrityError, check_integrity
from pageloom.scheduling.fit import check_size, room_for_output
from pageloom.scheduling.plan import Chunk, DraftPlan, Limits, StepPlan
from pageloom.scheduling.request import Branch, FinishReason, Request, Status


class PolicyError(RuntimeError):
    """The scheduling policy raised, or made no progress. Names the policy."""


@dataclass(frozen=True, slots=True)
class QueueView:
    """Implements `pageloom.contract.SchedulerView`."""

    now: float
    running: tuple[RequestView, ...]
    waiting: WaitingView
    arrived: tuple[RequestView, ...]
    finished: tuple[RequestView, ...]


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

    ``pool`` is where KV is computed; ``host`` takes the blocks of requests that are swapped out,
    and without it none is.
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
        host: BlockPool | None = None,
        clock: Callable[[], float] = time.monotonic,
        steps_in_flight: int = 1,
    ) -> None:
        """With ``steps_in_flight`` more than 1, as many plans may be made before the first of them
        is advanced and `complete`. A request is in one of them at a time, and the running ones are
        shared out evenly, so that the stages of a pipeline have equal work."""
        self.scheduler = scheduler
        self.pool = pool
        self.host = host
        self.limits = limits
        self.policy = policy
        self.clock = clock
        # An OrderedDict and not a dict: taking from a dict's head again and again is quadratic.
        self.waiting: OrderedDict[str, Request] = OrderedDict()
        self.running: dict[str, Request] = {}
        self._arrived: dict[RequestView, None] = {}  # since the last plan
        self._finished: list[RequestView] = []
        self._empty_plans = 0
        self._fruitless_preemptions = 0
        self._steps_in_flight = steps_in_flight
        self._in_flight: list[StepPlan] = []  # while several may be

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
        check_size(request, self.limits, self.pool.num_blocks)
        room = room_for_output(request, self.limits, self.pool.num_blocks)
        request.open(self.pool, self.limits.block_size, room)
        self.waiting[request.request_id] = request
        self._arrived[request.view] = None

    def plan(self) -> StepPlan:
        """Let the policy plan a step, and move the requests that it admitted or preempted.

        Raises `PolicyError` if the policy raises or is stuck. No block is lost then, and every
        request can still be finished.
        """
        running = self.running
        if self._steps_in_flight > 1:
            # Whoever gives way must be chosen among all, or two requests may evict each other for
            # ever: where blocks may run out, one step follows the other.
            enough = self.pool.num_free >= self._growth()
            if self._in_flight and not enough:
                return self._remember(StepPlan(()))
            running = self._share() if enough else running
        hidden = sum(r.seats for name, r in self.running.items() if name not in running)
        if not running and hidden >= self.limits.max_num_seqs:  # all are in other plans
            return self._remember(StepPlan(()))
        draft = DraftPlan(self.pool, self.host, self.limits, running, self.waiting, hidden)
        view = QueueView(
            now=self.clock(),
            running=tuple(request.view for request in running.values()),
            waiting=WaitingView(self.waiting),
            arrived=tuple(self._arrived),
            finished=tuple(self._finished),
        )
        self._arrived.clear()
        self._finished.clear()
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
        return self._remember(plan)

    def complete(self, plan: StepPlan) -> None:
        """A plan was carried out and advanced, or given up: its requests may be planned again."""
        if self._steps_in_flight > 1:
            self._in_flight.remove(plan)

    def advance(self, chunk: Chunk, token_ids: Sequence[int] = ()) -> list[Branch]:
        """Record that a chunk was computed, and the ``chunk.draws`` tokens drawn after it.

        Several tokens fork the branch: each becomes the first of one of the request's branches.
        Returns the branches that got a token, in the order of the tokens.
        """
        request = chunk.branch.request
        chunk.branch.num_computed = chunk.stop
        if not token_ids:
            return []
        if len(token_ids) > 1:
            request.fork()
        branches = request.branches[:] if len(token_ids) > 1 else [chunk.branch]
        for branch, token_id in zip(branches, token_ids, strict=True):
            branch.append(token_id)
        self._note_first_token(request)
        return branches

    def advance_beams(
        self, chunks: Sequence[Chunk], candidates: Sequence[Sequence[tuple[int, float]]]
    ) -> None:
        """`advance` for the chunks of one beam request, one per live beam and in their order.

        ``candidates`` has a list of (token id, log-probability) per chunk, the likeliest first,
        ``request.beams.num_candidates`` of them; nothing if the chunks drew none. Once
        ``request.beams.done`` the request is to be finished.
        """
        request = chunks[0].branch.request
        for chunk in chunks:
            chunk.branch.num_computed = chunk.stop
        if candidates and request.beams is not None:
            beams = [branch.output_token_ids for branch in request.branches]
            if choices := request.beams.step(beams, candidates):
                request.reorder(choices)
            self._note_first_token(request)

    def end(self, branch: Branch) -> None:
        """End one of several branches of a request and give its blocks and its seat back."""
        request = branch.request
        request.branches.remove(branch)
        request.finished_tokens += len(branch.output_token_ids)
        request.seats -= 1
        branch.table.release()

    def finish(self, request: Request, reason: FinishReason) -> RequestRecord:
        """End a request in whatever state it is, free its blocks and tell what became of it."""
        if request.status is Status.FINISHED:
            raise ValueError(f"request {request.request_id} is finished already")
        self.running.pop(request.request_id, None)
        self.waiting.pop(request.request_id, None)
        for branch in request.branches:
            if not request.swapped:
                self.pool.forget(_unusable_blocks(branch, reason))
            branch.table.release()
        request.status = Status.FINISHED
        request.finish_reason = reason
        if request.view in self._arrived:
            del self._arrived[request.view]  # no policy has seen it
        else:
            self._finished.append(request.view)
        return RequestRecord(
            request_id=request.request_id,
            user=request.user,
            finish_reason=reason,
            prompt_tokens=len(request.prompt_token_ids),
            cached_tokens=request.cached_tokens,
            output_tokens=request.returned_tokens,
            preemptions=request.num_preemptions,
            arrived=request.arrival_time,
            first_scheduled=request.first_scheduled_time,
            first_token=request.first_token_time,
            finished=self.clock(),
        )

    def kv_tokens(self, plan: StepPlan) -> int:
        """Token states in the used blocks once ``plan`` has run, each counted once however many
        branches share it."""
        stops = {chunk.branch: chunk.stop for p in (*self._in_flight, plan) for chunk in p.chunks}
        tokens = blocks = 0
        for request in self.running.values():
            ends = [stops.get(branch, branch.num_computed) for branch in request.branches]
            if len(ends) == 1:
                tokens += ends[0]
                blocks += len(request.branches[0].table.blocks)
            else:
                filled = _filled_slots(request.branches, ends)
                tokens += sum(filled.values())
                blocks += len(filled)
        # What requests share with each other are full blocks.
        return tokens - (blocks - self.pool.num_used) * self.limits.block_size

    def reset_prefix_cache(self) -> None:
        """Give up all cached prefixes, those that open requests have computed included."""
        self.pool.forget_all()
        busy = self._busy()
        for request in (*self.running.values(), *self.waiting.values()):
            if request in busy or any(branch.num_computed for branch in request.branches):
                request.isolate()

    def check_integrity(self) -> None:
        """Raise `pageloom.memory.IntegrityError` if a block is leaked or counted wrongly, or if a
        branch has computed more than its blocks hold."""
        requests = [*self.running.values(), *self.waiting.values()]
        branches = [branch for request in requests for branch in request.branches]
        for pool in filter(None, (self.pool, self.host)):
            check_integrity(pool, [b.table for b in branches if b.table.pool is pool])
        for branch in branches:
            if branch.num_computed > branch.table.capacity:
                raise IntegrityError(
                    f"request {branch.request.request_id} has {branch.num_computed} tokens "
                    f"computed, but its blocks hold {branch.table.capacity}"
                )

    def _remember(self, plan: StepPlan) -> StepPlan:
        if self._steps_in_flight > 1:
            self._in_flight.append(plan)
        return plan

    def _growth(self) -> int:
        """Most blocks that the running requests can take in their next steps."""
        blocks, size = 0, self.limits.block_size
        for request in self.running.values():
            for branch in request.branches:
                tokens = min(branch.num_pending, self.limits.max_num_batched_tokens)
                blocks += 2 + tokens // size  # a block begun, and a copy of a shared one
        return blocks

    def _busy(self) -> set[Request]:
        """Those that are in plans in flight."""
        return {chunk.branch.request for plan in self._in_flight for chunk in plan.chunks}

    def _share(self) -> dict[str, Request]:
        """The running requests that the next plan may have: none that is in another."""
        busy = self._busy()
        free = {name: r for name, r in self.running.items() if r not in busy}
        if self._empty_plans:
            return free  # whoever was left out may be who can go on
        share = -(-len(self.running) // self._steps_in_flight)
        return dict(islice(free.items(), share))

    def _note_first_token(self, request: Request) -> None:
        if request.first_token_time is None:
            request.first_token_time = self.clock()

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
        idle = not (plan.chunks or plan.preempted or self._in_flight) and self.has_requests
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


def _unusable_blocks(branch: Branch, reason: FinishReason) -> Sequence[int]:
    """Blocks of an ending branch that others must not find: those that no step has filled, and
    all of them after a failure."""
    blocks = branch.table.blocks
    filled = 0 if reason == "error" else branch.num_computed // branch.table.block_size
    return blocks[filled:]


def _filled_slots(branches: Sequence[Branch], ends: Sequence[int]) -> dict[int, int]:
    """How many tokens each block of ``branches`` holds, of which ``ends`` are computed."""
    size, filled = branches[0].table.block_size, dict[int, int]()
    for branch, end in zip(branches, ends, strict=True):
        whole, rest = divmod(end, size)
        filled.update(dict.fromkeys(branch.table.blocks[:whole], size))
        if rest:
            block = branch.table.blocks[whole]
            filled[block] = max(filled.get(block, 0), rest)
    return filled
