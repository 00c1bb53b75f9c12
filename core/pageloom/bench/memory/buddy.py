"""The buddy system (Knuth, The Art of Computer Programming, vol. 1, section 2.5)."""

from __future__ import annotations

from pageloom.memory import IntegrityError


class BuddyAllocator:
    """Contiguous regions of 2^k slots each, at addresses that are multiples of their size.

    A region is split in two buddies until it is just large enough, and joined with its buddy as
    soon as both are free. ``slots`` need not be a power of two: what there is at first are the
    largest aligned regions that add up to it, which have no buddies of their own size.
    """

    def __init__(self, slots: int) -> None:
        if slots < 1:
            raise ValueError(f"a buddy allocator needs at least 1 slot, not {slots}")
        self.slots = slots
        self.num_used = 0
        self._free: list[set[int]] = [set() for _ in range(slots.bit_length())]  # by k
        self._order_at: dict[int, int] = {}  # k of the regions handed out, by address
        address = 0
        for order in reversed(range(slots.bit_length())):
            if slots >> order & 1:
                self._free[order].add(address)
                address += 1 << order

    def allocate(self, slots: int) -> int | None:
        """The address of a region of at least ``slots`` slots, or None if there is none."""
        if slots < 1:
            raise ValueError(f"a region needs at least 1 slot, not {slots}")
        order = (slots - 1).bit_length()
        larger = range(order, len(self._free))
        found = next((k for k in larger if self._free[k]), None)
        if found is None:
            return None
        address = min(self._free[found])
        self._free[found].remove(address)
        for k in reversed(range(order, found)):
            self._free[k].add(address + (1 << k))
        self._order_at[address] = order
        self.num_used += 1 << order
        return address

    def size_of(self, address: int) -> int:
        """Slots of the region that was handed out at ``address``."""
        return 1 << self._order_at[address]

    def release(self, address: int) -> None:
        """Give a region back. Raises `IntegrityError` unless it was handed out."""
        order = self._order_at.pop(address, None)
        if order is None:
            raise IntegrityError(f"no region was handed out at {address}")
        self.num_used -= 1 << order
        while (buddy := address ^ (1 << order)) in self._free[order]:
            self._free[order].remove(buddy)
            address = min(address, buddy)
            order += 1
        self._free[order].add(address)

    def free_regions(self) -> list[tuple[int, int]]:
        """(address, slots) of each, in order of address."""
        return sorted((address, 1 << k) for k, free in enumerate(self._free) for address in free)
