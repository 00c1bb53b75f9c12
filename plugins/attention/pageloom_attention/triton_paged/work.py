"""Which program attends for which rows over which tokens.

Computed on the host, from what the batch already holds there, and copied to the GPU while it
still runs the step before.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pageloom_attention.triton_paged.tiles import Tiles

Table = npt.NDArray[np.int32]
LEAST_SPLIT = 256  # tokens; fewer are not worth a partial result


@dataclass(frozen=True, slots=True)
class Work:
    """One launch. All numbers are int32; programs whose line is zero do nothing."""

    items: Table
    """``[programs, 8]``: the sequence; the first row and the end of the rows of its sequence,
    counted over the whole batch; what to add to a query's index to get its position; the first
    token to attend to and the end; where the partial result goes, or -1 for the output; how many
    splits of the same rows come before this one."""

    merges: Table
    """``[tiles, 4]``: the first row and the end of rows as above, the place of the first partial
    result and how many there are. Rows whose result is already in the output have no line."""

    def padded(self, tiles: int, programs: int) -> Work:
        """With as many lines as `divide` makes at most of so many tiles of rows."""
        items = np.zeros((tiles + programs, 8), np.int32)
        items[: len(self.items)] = self.items
        merges = np.zeros((tiles, 4), np.int32)
        merges[: len(self.merges)] = self.merges
        return Work(items, merges)


def divide(
    query_start: npt.NDArray[np.int64],
    seq_lens: npt.NDArray[np.int64],
    group: int,
    window: int | None,
    size: Tiles,
    programs: int,
) -> Work:
    """Cut a batch into tiles of rows, and those that see too many tokens for the ``programs`` that
    fill the chip (per KV head) to be equally busy into splits of tokens.

    There are at most ``programs`` items more than tiles, and fewer than ``2 * programs`` partial
    results.
    """
    rows, queries = size.rows, np.diff(query_start)
    tiles = -(-queries * group // rows)
    sequence = np.repeat(np.arange(len(queries)), tiles)
    ordinal = np.arange(len(sequence)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    row = query_start[:-1][sequence] * group + ordinal * rows
    row_end = query_start[1:][sequence] * group
    shift = (seq_lens - query_start[1:])[sequence]
    end = (np.minimum(row + rows, row_end) - 1) // group + shift + 1
    start = np.zeros_like(end)
    if window is not None:
        start = np.maximum(row // group + shift - window + 1, 0)

    length = end - start
    share = max(-(-int(length.sum()) // programs), LEAST_SPLIT)
    most = -(-share // size.tokens) * size.tokens
    # Splits of the same rows are equally long, but for a whole iteration.
    each = -(-length // -(-length // most))
    each = -(-each // size.tokens) * size.tokens
    splits = -(-length // each)
    slot = np.cumsum(np.where(splits > 1, splits, 0)) - splits

    of = np.repeat(np.arange(len(sequence)), splits)
    split = np.arange(len(of)) - np.repeat(np.cumsum(splits) - splits, splits)
    first = start[of] + split * each[of]
    last = np.minimum(first + each[of], end[of])
    place = np.where(splits[of] > 1, slot[of] + split, -1)
    items = np.stack(
        [sequence[of], row[of], row_end[of], shift[of], first, last, place, split], axis=1
    )
    # The longest first, so that none begins when the others end.
    items = items[np.argsort(first - last, kind="stable")]
    merges = np.stack([row, row_end, slot, splits], axis=1)[splits > 1]
    return Work(items.astype(np.int32), merges.astype(np.int32))
