"""The buddy allocator: regions are aligned and disjoint, and nothing is lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
)

from pageloom.bench.memory.buddy import BuddyAllocator
from pageloom.memory import IntegrityError


class Buddies(RuleBasedStateMachine):
    regions = Bundle("regions")

    @initialize(slots=st.integers(1, 300))
    def start(self, slots):
        self.allocator = BuddyAllocator(slots)
        self.untouched = self.allocator.free_regions()
        self.held = {}  # size by address

    @rule(target=regions, slots=st.integers(1, 320))
    def allocate(self, slots):
        largest = max((size for _, size in self.allocator.free_regions()), default=0)
        address = self.allocator.allocate(slots)
        if address is None:
            assert largest < slots
            return None
        self.held[address] = self.allocator.size_of(address)
        assert slots <= self.held[address] < 2 * slots
        return address

    @rule(address=consumes(regions))
    def release(self, address):
        if address is not None:
            self.allocator.release(address)
            del self.held[address]

    @invariant()
    def regions_are_aligned_and_fill_the_memory_without_overlap(self):
        regions = sorted([*self.held.items(), *self.allocator.free_regions()])
        end = 0
        for address, size in regions:
            assert address == end
            assert address % size == 0
            end += size
        assert end == self.allocator.slots
        assert self.allocator.num_used == sum(self.held.values())

    @invariant()
    def free_buddies_are_joined(self):
        free = set(self.allocator.free_regions())
        assert not any((address ^ size, size) in free for address, size in free)

    def teardown(self):
        for address in getattr(self, "held", {}):
            self.allocator.release(address)
        if hasattr(self, "allocator"):
            assert self.allocator.free_regions() == self.untouched


TestBuddies = Buddies.TestCase


def test_a_memory_of_any_size_is_used_to_the_last_slot():
    allocator = BuddyAllocator(15728)
    assert [size for _, size in allocator.free_regions()] == [
        8192,
        4096,
        2048,
        1024,
        256,
        64,
        32,
        16,
    ]
    assert sum(allocator.allocate(2048) is not None for _ in range(9)) == 7
    assert allocator.allocate(1024) is not None


@given(st.integers(1, 1000), st.integers(0, 1000))
def test_only_what_was_handed_out_comes_back(slots, address):
    with pytest.raises(IntegrityError, match=f"handed out at {address}"):
        BuddyAllocator(slots).release(address)


def test_nothing_is_released_twice():
    allocator = BuddyAllocator(8)
    address = allocator.allocate(3)
    allocator.release(address)
    with pytest.raises(IntegrityError):
        allocator.release(address)


@pytest.mark.parametrize("slots", [0, -1])
def test_sizes_below_one_are_refused(slots):
    with pytest.raises(ValueError, match="at least 1 slot"):
        BuddyAllocator(slots)
    with pytest.raises(ValueError, match="at least 1 slot"):
        BuddyAllocator(8).allocate(slots)
