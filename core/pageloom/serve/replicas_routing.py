"""Which of several engines a request goes to."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from pageloom.memory.prefix import block_key, root_hash

MARGIN, FACTOR = 8, 1.5


def is_too_busy(open_requests: int, least: int) -> bool:
    """Whether a replica's cached prefix is not worth its open requests, of which the least loaded
    one has ``least``: more than `FACTOR` times as many, and `MARGIN` more."""
    return open_requests > FACTOR * least + MARGIN


class PrefixHashes:
    """What the full blocks of a sequence hash to, as in the engine's own index."""

    def __init__(self, block_size: int, salt: str = "") -> None:
        self.hashes: list[bytes] = []
        self._block_size = block_size
        self._last = root_hash(salt)
        self._rest: list[int] = []  # tokens of the block that is not full yet

    def extend(self, token_ids: Iterable[int]) -> None:
        self._rest += token_ids
        size, full = self._block_size, len(self._rest) // self._block_size * self._block_size
        for start in range(0, full, size):
            self._last = block_key(self._last, self._rest[start : start + size]).hash
            self.hashes.append(self._last)
        del self._rest[:full]


class PrefixMap:
    """Which replica has most likely cached what: the blocks that it was sent or has written, the
    most recent ones, as many as it has room for. What a replica has dropped earlier, and what it
    has not computed yet, is believed to be there; then it computes it, and nothing else is lost."""

    def __init__(self) -> None:
        self._blocks: dict[int, OrderedDict[bytes, None]] = {}

    def add(self, replica: int, hashes: Sequence[bytes], room: int) -> None:
        """``replica``, with ``room`` for so many blocks, has these, which follow each other."""
        blocks = self._blocks.setdefault(replica, OrderedDict())
        for each in reversed(hashes):  # a prefix is worth more than what follows it, so it stays
            blocks[each] = None
            blocks.move_to_end(each)
        while len(blocks) > room:
            blocks.popitem(last=False)

    def count(self, replica: int, hashes: Sequence[bytes]) -> int:
        """How many of the first blocks ``replica`` has."""
        blocks = self._blocks.get(replica, OrderedDict())
        found = 0
        while found < len(hashes) and hashes[found] in blocks:
            found += 1
        return found

    def forget(self, replica: int) -> None:
        """``replica`` has nothing any more."""
        self._blocks.pop(replica, None)


class Turns:
    """Numbers in turn, so that equals are treated as such."""

    def __init__(self) -> None:
        self._last = -1

    def next(self, among: Iterable[int]) -> int:
        """The next higher one, or the lowest."""
        self._last = min(among, key=lambda number: (number <= self._last, number))
        return self._last


class Router:
    """Chooses by ``routing``: ``prefix``, ``least_loaded`` or ``round_robin``."""

    def __init__(self, routing: str) -> None:
        self.by_prefix = routing == "prefix"
        self._by_load = routing != "round_robin"
        self._map = PrefixMap()
        self._turns = Turns()

    def choose(self, loads: Mapping[int, int], hashes: Sequence[bytes] = ()) -> int:
        """One of the replicas in ``loads``, each with how many requests are open there."""
        least = min(loads.values())
        among = list(loads)
        if self.by_prefix:
            cached = {each: self._map.count(each, hashes) for each in among}
            most = max(cached.values())
            holders = [each for each in among if cached[each] == most]
            least_holding = min(loads[each] for each in holders)
            if not is_too_busy(least_holding, least):
                among, least = holders, least_holding
        if self._by_load:
            among = [each for each in among if loads[each] == least]
        return self._turns.next(among)

    def sent(self, replica: int, hashes: Sequence[bytes], room: int) -> None:
        """Remember what the chosen replica has from now on."""
        if self.by_prefix:
            self._map.add(replica, hashes, room)

    def forget(self, replica: int) -> None:
        """It has died, or was stopped."""
        self._map.forget(replica)
