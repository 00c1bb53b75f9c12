"""The paper's baselines: Orca, whose requests each reserve one contiguous region on arrival."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from typing import NamedTuple

from pageloom.bench.memory.buddy import BuddyAllocator
from pageloom.bench.memory.usage import Iteration, Usage
from pageloom.bench.workload import MAX_MODEL_LEN, Arrival, Lengths

Reservation = Callable[[Lengths], int]  # slots that a request asks for


def reserve_max(lengths: Lengths) -> int:
    """The longest that the model can become."""
    return MAX_MODEL_LEN


def reserve_power_of_two(lengths: Lengths) -> int:
    """Room for an output of at most twice its true length, a power of two (section 6.1)."""
    output = 1 << (lengths.output_tokens - 1).bit_length()
    return min(lengths.prompt_tokens + output, MAX_MODEL_LEN)


def reserve_oracle(lengths: Lengths) -> int:
    """What the request will really need."""
    return sum(lengths)


RESERVATIONS: dict[str, Reservation] = {
    "Orca (Max)": reserve_max,
    "Orca (Pow2)": reserve_power_of_two,
    "Orca (Oracle)": reserve_oracle,
}


class _Running(NamedTuple):
    last_step: int  # sorts first: who ends next
    address: int
    lengths: Lengths
    reserved: int


class ContiguousSystem:
    """Iteration-level scheduling (Yu et al., OSDI 2022): in every step, each running request gets
    a token, and waiting ones join in order of arrival while a region is found for them."""

    def __init__(self, slots: int, reserve: Reservation, max_num_seqs: int) -> None:
        self.slots = slots
        self._reserve = reserve
        self._max_num_seqs = max_num_seqs
        self._allocator = BuddyAllocator(slots)
        self._waiting: deque[Lengths] = deque()
        self._running: list[_Running] = []  # a heap
        self._steps = 0
        # Sums over running requests.
        self._token_states = self._needed = self._reserved = 0

    @property
    def busy(self) -> bool:
        return bool(self._running or self._waiting)

    def add(self, arrival: Arrival) -> None:
        self._waiting.append(arrival.lengths)

    def step(self, now: float) -> Iteration:
        self._steps += 1
        tokens = decodes = len(self._running)
        self._token_states += decodes
        while self._waiting and len(self._running) < self._max_num_seqs:
            if not self._admit(self._waiting[0]):
                break
            tokens += self._waiting.popleft().prompt_tokens
        requests = len(self._running)
        iteration = Iteration(
            self._usage(), requests, requests - decodes, tokens, len(self._waiting)
        )
        while self._running and self._running[0].last_step == self._steps:
            self._end(heappop(self._running))
        return iteration

    def _admit(self, lengths: Lengths) -> bool:
        reserved = self._reserve(lengths)
        address = self._allocator.allocate(reserved)
        if address is None:
            return False
        # The first step computes the prompt and draws a token, each further one a token.
        last_step = self._steps + lengths.output_tokens - 1
        heappush(self._running, _Running(last_step, address, lengths, reserved))
        self._token_states += lengths.prompt_tokens
        self._needed += sum(lengths)
        self._reserved += reserved
        return True

    def _end(self, request: _Running) -> None:
        self._allocator.release(request.address)
        self._token_states -= sum(request.lengths) - 1  # the last token drawn is never computed
        self._needed -= sum(request.lengths)
        self._reserved -= request.reserved

    def _usage(self) -> Usage:
        used = self._allocator.num_used
        return Usage(
            token_states=self._token_states,
            reserved=self._needed - self._token_states,
            internal=self._reserved - self._needed,
            rounding=used - self._reserved,
            free=self.slots - used,
        )
