"""What parsers have in common whose calls are JSON: one is read after the other."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence

from pageloom.contract import CallPiece, ToolParser
from pageloom_tools.call import CallReader


class JSONCallParser(ToolParser):
    """Takes calls from what was fed. Where they are, and what else is there, the style says."""

    def __init__(self) -> None:
        self._kept = ""  # what is not read yet
        self._passed = ""  # before the call that may come, to give back if it is none
        self._call: CallReader | None = None
        self._calls = 0

    def feed(self, text: str) -> Sequence[str | CallPiece]:
        self._kept += text
        return list(self._read())

    def finish(self) -> Sequence[str | CallPiece]:
        if self._call is not None:
            return [] if self._call.named else [self._passed + self._call.raw]
        return [] if self._is_left_out() else [self._passed + self._kept]

    @abstractmethod
    def _read(self) -> Iterator[str | CallPiece]:
        """Whatever is sure of what was kept."""

    @abstractmethod
    def _ended(self, call: CallReader) -> None:
        """A call has ended, or what began like one has turned out to be none."""

    @abstractmethod
    def _is_left_out(self) -> bool:
        """Whether what is kept at the end is no text, such as a separator behind a call."""

    def _read_call(self, call: CallReader) -> Iterator[str | CallPiece]:
        self._kept = self._kept[call.feed(self._kept) :]
        yield from call.take()
        if not (call.ended or call.broken):
            return
        self._call = None
        if call.named:
            self._calls += 1
        else:
            yield self._passed + call.raw
        self._passed = ""
        self._ended(call)
