"""What must hold of the KV cache after every step plan, whatever the policy."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate, product

from pageloom.memory import IntegrityError
from pageloom.scheduling import Branch, Chunk, Planner, StepPlan
from pageloom.scheduling.plan import BlockPairs
from pageloom.scheduling.request import Status


class KVInvariants:
    """Checks every plan of a planner, and follows what it does to the KV cache.

    It keeps a shadow of the cache in which a slot holds, for a token's key and value, a hash of
    that token and all before it. Each plan is carried out on the shadow in the order that
    `StepPlan` tells, and then every branch must find its own tokens in its blocks. So whatever
    ruins a cache is found in the step that does it: a block written while others need it, a copy
    forgotten or made too late, a prefix hit on something else.

    Besides: limits are kept, no slot is written twice in a step, copies and swaps do not get in
    each other's way, a request is in one queue and only running ones run, and
    `Planner.check_integrity`.

    ::

        planner = Planner(scheduler, BlockPool(64), limits, policy="mine")
        KVInvariants(planner).watch()

    Raises `pageloom.memory.IntegrityError` for what is wrong with blocks, and `AssertionError`
    for other faults. A plan costs time in proportion to all tokens in the cache.
    """

    def __init__(self, planner: Planner) -> None:
        """``planner`` must be new: its cache is taken to be empty."""
        self.planner = planner
        size = planner.limits.block_size
        self._shadow = _Shadow("block", size)
        self._host = _Shadow("host block", size)

    def watch(self) -> None:
        """Check each plan that the planner makes from now on, before its caller gets it."""
        plan = self.planner.plan

        def checked() -> StepPlan:
            made = plan()
            self.check(made)
            return made

        self.planner.plan = checked  # type: ignore[method-assign]

    def check(self, plan: StepPlan) -> None:
        """Check a plan that `Planner.plan` has just returned, before any chunk is advanced."""
        self._check_limits(plan)
        self._check_queues(plan)
        self.planner.check_integrity()
        coming = self._host.snapshot([block for block, _ in plan.swapped_in])
        self._host.copy(plan.swapped_out, self._shadow)
        self._shadow.copy(plan.swapped_in, coming)
        self._shadow.copy(plan.copies, self._shadow)
        self._shadow.write(plan.chunks)
        stops = {chunk.branch: chunk.stop for chunk in plan.chunks}
        for branch in self._branches():
            shadow = self._host if branch.request.swapped else self._shadow
            shadow.check(branch, stops.get(branch, branch.num_computed))

    def _check_limits(self, plan: StepPlan) -> None:
        limits = self.planner.limits
        _require(
            plan.num_tokens <= limits.max_num_batched_tokens,
            f"{plan.num_tokens} tokens are planned, max_num_batched_tokens is "
            f"{limits.max_num_batched_tokens}",
        )
        seats = sum(request.seats for request in self.planner.running.values())
        _require(
            seats <= limits.max_num_seqs,
            f"{seats} seats are taken, max_num_seqs is {limits.max_num_seqs}",
        )
        for chunk in plan.chunks:
            branch, whole = chunk.branch, not limits.enable_chunked_prefill
            _require(
                chunk.num_tokens > 0 and chunk.start == branch.num_computed,
                f"{_name(branch)} is to run tokens {chunk.start} to {chunk.stop - 1}, but "
                f"{branch.num_computed} are computed",
            )
            _require(
                chunk.stop <= branch.num_tokens
                and bool(chunk.draws) == (chunk.stop == branch.num_tokens),
                f"{_name(branch)} has {branch.num_tokens} tokens, and is to draw {chunk.draws} "
                f"after {chunk.stop}",
            )
            # Several branches draw together, so each may be left with its newest token.
            newest = chunk.stop == branch.num_tokens - 1 and len(branch.request.branches) > 1
            _require(
                bool(chunk.draws) or newest or not whole,
                f"{_name(branch)} is to run in chunks, but enable_chunked_prefill is off",
            )

    def _check_queues(self, plan: StepPlan) -> None:
        running, waiting = self.planner.running, self.planner.waiting
        for status, queue in ((Status.RUNNING, running), (Status.WAITING, waiting)):
            for name, request in queue.items():
                _require(
                    request.status is status and request.request_id == name,
                    f"request {name} is {request.status.value} among those {status.value}",
                )
        for request in plan.preempted:
            _require(
                request.status is Status.WAITING,
                f"request {request.request_id} was preempted and is {request.status.value}",
            )
        for chunk in plan.chunks:
            _require(
                chunk.branch.request.status is Status.RUNNING
                and chunk.branch in chunk.branch.request.branches,
                f"{_name(chunk.branch)} is planned, but not running",
            )
        for request in waiting.values():
            for branch in request.branches:
                if not request.swapped and (branch.num_computed or branch.table.blocks):
                    raise IntegrityError(f"{_name(branch)} is waiting and holds blocks")

    def _branches(self) -> Iterator[Branch]:
        for queue in (self.planner.running, self.planner.waiting):
            for request in queue.values():
                yield from request.branches


class _Shadow:
    """What is in each slot of a cache: a hash of the tokens up to the one it was computed for."""

    def __init__(self, noun: str, block_size: int) -> None:
        self._noun = noun
        self._size = block_size
        self._content: dict[tuple[int, int], int | None] = {}  # by block and offset

    def snapshot(self, blocks: Collection[int]) -> _Shadow:
        """A shadow of its own of some of the blocks."""
        taken = _Shadow(self._noun, self._size)
        for slot in product(blocks, range(self._size)):
            taken._content[slot] = self._content.get(slot)
        return taken

    def copy(self, pairs: BlockPairs, source: _Shadow) -> None:
        """Copy blocks, all at the same time: no pair may depend on another."""
        targets = {target for _, target in pairs}
        if len(targets) < len(pairs):
            raise IntegrityError(f"a {self._noun} is copied to twice in one step: {pairs}")
        if source is self and not targets.isdisjoint(block for block, _ in pairs):
            raise IntegrityError(f"a {self._noun} is copied to and from in one step: {pairs}")
        for block, target in pairs:
            for offset in range(self._size):
                self._content[target, offset] = source._content.get((block, offset))

    def write(self, chunks: Sequence[Chunk]) -> None:
        """Compute ``chunks``."""
        writers: dict[tuple[int, int], Branch] = {}
        for chunk in chunks:
            branch, hashes = chunk.branch, _hashes(chunk.branch, chunk.stop)
            for position in range(chunk.start, chunk.stop):
                slot = self._slot(branch, position)
                if slot in writers:
                    raise IntegrityError(
                        f"slot {slot[1]} of {self._noun} {slot[0]} is written twice in one step: "
                        f"by {_name(writers[slot])} and by {_name(branch)}"
                    )
                writers[slot] = branch
                self._content[slot] = hashes[position]

    def check(self, branch: Branch, stop: int) -> None:
        """Raise unless the blocks of a branch hold its tokens before ``stop``."""
        for position, expected in enumerate(_hashes(branch, stop)):
            slot = self._slot(branch, position)
            if self._content.get(slot) != expected:
                what = "nothing" if self._content.get(slot) is None else "something else"
                raise IntegrityError(
                    f"{_name(branch)} has {stop} tokens computed, but where it reads token "
                    f"{position}, slot {slot[1]} of {self._noun} {slot[0]}, is {what}"
                )

    def _slot(self, branch: Branch, position: int) -> tuple[int, int]:
        index, offset = divmod(position, self._size)
        return branch.table.blocks[index], offset


def _hashes(branch: Branch, stop: int) -> list[int]:
    """For each token before ``stop``, a hash of it and all before it."""
    tokens = branch.tokens(0, stop)
    root = hash(branch.request.root_hash)
    return list(accumulate(tokens, lambda before, token: hash((before, token)), initial=root))[1:]


def _name(branch: Branch) -> str:
    return f"branch {branch.index} of request {branch.request.request_id}"


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)
