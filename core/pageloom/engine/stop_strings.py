"""Finding stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Finds the stop string that is complete first, however the text is cut into pieces.

    One Knuth-Morris-Pratt automaton per string: each character costs constant time whatever the
    strings, and the automata's states say how much of the text could still become a stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        # The longest first: it wins among strings that are complete at the same character.
        self._stops = sorted(stops, key=len, reverse=True)
        self._borders = [_borders(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # characters of each string that the text ends in

    @property
    def num_held(self) -> int:
        """Last characters of the text that could be the start of a stop string."""
        return max(self._matched, default=0)

    def find(self, text: str, *, armed: bool) -> tuple[int, str] | None:
        """Read on. Returns the first stop string complete in ``text`` and where it ends there.

        If not ``armed``, strings complete in ``text`` are passed over, but one that only starts
        in it can be found later. Call no more after a find.
        """
        if not self._stops:
            return None
        for end, char in enumerate(text, 1):
            hit = None
            for i, (stop, borders) in enumerate(zip(self._stops, self._borders, strict=True)):
                matched = self._matched[i]
                while matched and stop[matched] != char:
                    matched = borders[matched - 1]
                if stop[matched] == char:
                    matched += 1
                if matched == len(stop):
                    hit = hit or stop
                    matched = borders[matched - 1]
                self._matched[i] = matched
            if hit and armed:
                return end, hit
        return None


def _borders(stop: str) -> list[int]:
    """For each prefix of ``stop``, the length of its longest proper prefix that is its suffix."""
    borders, matched = [0], 0
    for char in stop[1:]:
        while matched and stop[matched] != char:
            matched = borders[matched - 1]
        matched += stop[matched] == char
        borders.append(matched)
    return borders
