"""The plan of one engine step: what a policy may do to requests, and the limits it works in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pageloom.contract import Refusal, RequestView
from pageloom.memory import BlockPool, distinct_blocks, move
from pageloom.scheduling.request import Branch, Request, Status, View

PreemptionMode = Literal["auto", "recompute", "swap"]
BlockPairs = Sequence[tuple[int, int]]  # (source, target)


@dataclass(frozen=True, slots=True)
class Limits:
    max_num_seqs: int  # branches that run at the same time
    max_num_batched_tokens: int  # tokens computed in one step
    max_model_len: int  # tokens of prompt and output
    block_size: int  # tokens
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    preemption_mode: PreemptionMode = "auto"  # auto swaps requests that have several branches


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens ``start .. start + num_tokens - 1`` of a branch, to be computed in this step."""

    branch: Branch
    start: int
    num_tokens: int
    draws: int  # next tokens to draw: 0 until nothing else is pending, several where it forks

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
    """What one step does: swap out and in, then copy, then compute.

    Blocks are taken and given back already; queues have yet to follow. A block that is swapped
    out may be a target of what is swapped in, on either side, so all sources are read before a
    target is written.
    """

    chunks: tuple[Chunk, ...]
    admitted: tuple[Request, ...] = ()
    preempted: tuple[Request, ...] = ()
    swapped_out: BlockPairs = ()  # from the pool to the host pool
    swapped_in: BlockPairs = ()  # from the host pool to the pool
    copies: BlockPairs = ()  # within the pool

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
        host: BlockPool | None,
        limits: Limits,
        running: Mapping[str, Request],
        waiting: Mapping[str, Request],
        hidden_seats: int = 0,
    ) -> None:
        """``hidden_seats`` are taken by running requests that this plan is not about."""
        self._pool = pool
        self._host = host
        self._limits = limits
        self._running = running
        self._waiting = waiting
        self._tokens_left = limits.max_num_batched_tokens
        taken = hidden_seats + sum(r.seats for r in running.values())
        self._seats_left = limits.max_num_seqs - taken
        self._spare_blocks = 0  # that the grant asked for must leave
        self._refusal: Refusal | None = None
        self._chunks: list[Chunk] = []
        self._admitted: list[Request] = []
        self._preempted: list[Request] = []
        self._swapped_out: list[tuple[int, int]] = []
        self._swapped_in: list[tuple[int, int]] = []
        self._copies: list[tuple[int, int]] = []
        self._settled: set[Request] = set()
        self._closed = False

    def close(self) -> StepPlan:
        """End the planning: from now on every call of the policy's raises `ValueError`."""
        self._closed = True
        return StepPlan(
            chunks=tuple(self._chunks),
            admitted=tuple(self._admitted),
            preempted=tuple(self._preempted),
            swapped_out=tuple(self._swapped_out),
            swapped_in=tuple(self._swapped_in),
            copies=tuple(self._copies),
        )

    @property
    def tokens_left(self) -> int:
        return self._tokens_left

    @property
    def seats_left(self) -> int:
        return self._seats_left

    @property
    def block_size(self) -> int:
        return self._limits.block_size

    @property
    def blocks_free(self) -> int:
        return self._pool.num_free

    @property
    def refusal(self) -> Refusal | None:
        return self._refusal

    def run(
        self, request: RequestView, max_tokens: int | None = None, spare_blocks: int = 0
    ) -> int:
        """See `PlanView.run`."""
        target = self._open(request)
        if max_tokens is not None and (not isinstance(max_tokens, int) or max_tokens < 1):
            raise ValueError(f"max_tokens must be an integer of at least 1, not {max_tokens!r}")
        if target.status is Status.WAITING and self._seats_left < target.seats:
            return self._refuse("seats")
        self._spare_blocks = spare_blocks
        budget = self._tokens_left if max_tokens is None else min(max_tokens, self._tokens_left)
        if all(branch.num_pending == 1 for branch in target.branches):
            granted = self._run_together(target, budget)
        else:
            granted = self._catch_up(target, budget)
        if not granted:
            return 0
        self._refusal = None
        self._settled.add(target)
        if target.status is Status.WAITING:
            self._seats_left -= target.seats
            self._admitted.append(target)
        return granted

    def preempt(self, request: RequestView) -> None:
        """See `PlanView.preempt`."""
        target = self._open(request)
        if target.status is not Status.RUNNING:
            raise ValueError(f"request {target.request_id} is not running")
        tables = [branch.table for branch in target.branches]
        if self._host and self._swaps(target) and distinct_blocks(tables) <= self._host.num_free:
            self._swapped_out += move(tables, self._host)
            target.swapped = True
        else:
            for branch in target.branches:
                branch.drop()
        target.num_preemptions += 1
        self._seats_left += target.seats
        self._preempted.append(target)
        self._settled.add(target)

    def preemptible(self, request: RequestView) -> bool:
        """See `PlanView.preemptible`."""
        target = self._request_of(request)
        return target.status is Status.RUNNING and target not in self._settled

    # -- granting ---------------------------------------------------------------------------

    def _run_together(self, target: Request, budget: int) -> int:
        """Grant every branch its newest token, or none."""
        branches = target.branches
        if len(branches) > budget:
            return self._refuse("tokens")
        missing = _copies_needed(branches)
        for branch in branches:
            missing += branch.table.missing(branch.num_tokens)
        if not self._bring_in(target, missing):
            return self._refuse("blocks")
        for branch in branches:
            self._grant(branch, 1)
        return len(branches)

    def _catch_up(self, target: Request, budget: int) -> int:
        """Grant prompt, or what has to be computed again, as far as it fits.

        The branches of a request draw their next tokens together, so each of several is left
        with its newest token pending.
        """
        total = 0
        left_over = 0 if len(target.branches) == 1 else 1
        for branch in target.branches:
            if branch.num_pending > left_over:
                granted = self._extend(branch, budget - total, left_over)
                total += granted
                if not granted:
                    break
        return total

    def _extend(self, branch: Branch, budget: int, left_over: int) -> int:
        """Grant one branch what it has pending but for ``left_over`` tokens, or a part of it."""
        target, size = branch.request, self._limits.block_size
        reused = self._find_computed(branch, (branch.num_tokens - 1 - left_over) // size)
        start = branch.num_computed + len(reused) * size
        pending = branch.num_tokens - start - left_over
        granted = min(pending, budget)
        if not granted or (granted < pending and not self._limits.enable_chunked_prefill):
            return self._refuse("tokens")
        missing = branch.table.missing(start + granted) - len(reused) + branch.table.shares(start)
        missing += sum(not self._pool.references(block) for block in reused)
        if not self._bring_in(target, missing):
            return self._refuse("blocks")
        if reused:
            branch.table.extend(reused)
            branch.num_computed = start
            if not target.num_preemptions:
                target.cached_tokens += len(reused) * size
        return self._grant(branch, granted)

    def _find_computed(self, branch: Branch, limit: int) -> list[int]:
        """Blocks that go on where the branch's table ends, up to block ``limit`` of the table, and
        hold its tokens or will when this step has run."""
        request, size = branch.request, self._limits.block_size
        first, offset = divmod(branch.num_computed, size)
        if offset or request.swapped:
            return []
        found: list[int] = []
        if not first and branch is not request.branches[0]:
            table = request.branches[0].table
            found = table.blocks[: min(limit, len(request.prompt_token_ids) // size)].tolist()
        # What is read from the cache is not computed, and so yields no log-probabilities.
        if self._limits.enable_prefix_caching and request.params.prompt_logprobs is None:
            for index in range(first + len(found), limit):
                block = self._pool.find(branch.key(index))
                if block is None:
                    break
                found.append(block)
        return found

    def _grant(self, branch: Branch, num_tokens: int) -> int:
        """Run the next ``num_tokens`` of a branch; the blocks that this takes are free."""
        request, table = branch.request, branch.table
        start, stop = branch.num_computed, branch.num_computed + num_tokens
        if table.shares(start):
            self._copies.append(table.copy_on_write(start))
        table.grow(stop)
        draws = 0
        if stop == branch.num_tokens:
            forks = request.beams is None and not branch.output_token_ids
            draws = request.seats if forks else 1
        self._chunks.append(Chunk(branch, start, num_tokens, draws))
        self._tokens_left -= num_tokens
        self._register(branch, start, stop)
        return num_tokens

    def _register(self, branch: Branch, start: int, stop: int) -> None:
        """Let others find the blocks that are full when positions ``start .. stop - 1`` are
        computed."""
        if self._limits.enable_prefix_caching:
            size = self._limits.block_size
            for index in range(start // size, stop // size):
                self._pool.register(branch.key(index), branch.table.blocks[index])

    def _bring_in(self, target: Request, missing: int) -> bool:
        """Whether ``missing`` blocks are free; then, if the request is on the host, bring it in.

        What is missing may be counted while its tables are on the host: they share the same there.
        """
        tables = [branch.table for branch in target.branches] if target.swapped else []
        if missing + distinct_blocks(tables) > self._pool.num_free - self._spare_blocks:
            return False
        if tables:
            self._swapped_in += move(tables, self._pool)
            target.swapped = False
            for branch in target.branches:
                self._register(branch, 0, branch.num_computed)
        return True

    def _swaps(self, target: Request) -> bool:
        mode, branches = self._limits.preemption_mode, target.branches
        if len(branches) == 1:
            return mode == "swap"
        # While branches are being computed again, some do not hold yet what they will share.
        return mode != "recompute" and all(branch.num_pending == 1 for branch in branches)

    # -- checks -----------------------------------------------------------------------------

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


def _copies_needed(branches: Sequence[Branch]) -> int:
    """Blocks that are copied when each of ``branches`` writes its next token."""
    if len(branches) == 1:
        return int(branches[0].table.shares(branches[0].num_computed))
    writers = Counter(
        branch.table.blocks[branch.num_computed // branch.table.block_size]
        for branch in branches
        if branch.table.shares(branch.num_computed)
    )
    pool = branches[0].table.pool
    # The last who holds a block writes in place.
    return sum(count - (pool.references(block) == count) for block, count in writers.items())
