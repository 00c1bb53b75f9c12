"""Which replica a request goes to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from pageloom.bench.simulate.load import Asked, Load
from pageloom.bench.simulate.replica import Replica
from pageloom.memory import BlockKey, block_key
from pageloom.serve.replicas_routing import is_too_busy


class Router(ABC):
    """Sees the replicas as they are when a request arrives."""

    independent = False
    """Whether where a request goes depends on its number alone."""

    def __init__(self, replicas: Sequence[Replica], load: Load, block_size: int) -> None:
        self.replicas = replicas
        self.load = load
        self.block_size = block_size

    @abstractmethod
    def choose(self, number: int, asked: Asked, prompt: Sequence[int]) -> int:
        """The index of a replica."""


class RoundRobin(Router):
    """One after the other."""

    independent = True

    def choose(self, number: int, asked: Asked, prompt: Sequence[int]) -> int:
        return number % len(self.replicas)


class LeastLoaded(Router):
    """Where the fewest requests are open; of several, where one was sent the longest ago."""

    def __init__(self, replicas: Sequence[Replica], load: Load, block_size: int) -> None:
        super().__init__(replicas, load, block_size)
        self._last = [0] * len(replicas)  # by replica: when it was chosen last

    def choose(self, number: int, asked: Asked, prompt: Sequence[int]) -> int:
        chosen = self.least(range(len(self.replicas)))
        self._last[chosen] = number + 1
        return chosen

    def least(self, indices: Sequence[int]) -> int:
        replicas, last = self.replicas, self._last
        fewest = min([replicas[i].open for i in indices])
        return min((last[i], i) for i in indices if replicas[i].open == fewest)[1]


class LongestPrefix(LeastLoaded):
    """Where most of the prompt is in the cache, and of several, where the fewest requests are open.

    If the server's router would find those too busy, all are asked: a prefix that everybody begins
    with must not pile them all up in one place. Unlike the server, this looks into the caches
    themselves.
    """

    def __init__(self, replicas: Sequence[Replica], load: Load, block_size: int) -> None:
        super().__init__(replicas, load, block_size)
        self._keys = [_keys(prefix, block_size) for prefix in load.prefixes]

    def choose(self, number: int, asked: Asked, prompt: Sequence[int]) -> int:
        if self.load.given is not None:
            keys = _keys(prompt, self.block_size)
        else:  # what follows the prefix is nobody else's
            keys = self._keys[asked.group] if asked.group >= 0 else []
        chosen = self.least(self._holders(keys))
        self._last[chosen] = number + 1
        return chosen

    def _holders(self, keys: Sequence[BlockKey]) -> Sequence[int]:
        """Those that hold the most of a prompt, or all replicas if these are too busy. A cache
        gives up the last blocks of a prefix first, so the longest can be found by halving."""
        everyone = range(len(self.replicas))
        holders: Sequence[int] = everyone
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high) // 2
            if found := [i for i in holders if self.replicas[i].holds(keys[middle])]:
                low, holders = middle + 1, found
            else:
                high = middle
        least, least_holding = (
            min([self.replicas[i].open for i in among]) for among in (everyone, holders)
        )
        return everyone if is_too_busy(least_holding, least) else holders


ROUTERS: Mapping[str, type[Router]] = {
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "prefix": LongestPrefix,
}


def _keys(prompt: Sequence[int], size: int) -> list[BlockKey]:
    """Of the full blocks that a prompt begins with, of which the last token is always computed."""
    keys: list[BlockKey] = []
    for start in range(0, len(prompt) - 1 - (len(prompt) - 1) % size, size):
        parent = keys[-1].hash if keys else b""
        keys.append(block_key(parent, prompt[start : start + size]))
    return keys
