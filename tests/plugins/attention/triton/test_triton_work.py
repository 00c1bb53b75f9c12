"""How `triton_paged` divides a step among programs."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pageloom_attention.triton_paged.tiles import Tiles
from pageloom_attention.triton_paged.work import LEAST_SPLIT, divide

STEPS = st.lists(
    st.tuples(st.integers(1, 300), st.sampled_from([0, 1, 63, 64, 5000, 200_000])),
    min_size=1,
    max_size=20,
)


def divided(step, group=4, window=None, tiles=None, programs=33):
    """``step``: the new tokens and the earlier tokens of each sequence."""
    new = np.array([n for n, _ in step], dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(new)])
    lengths = new + np.array([old for _, old in step], dtype=np.int64)
    return divide(starts, lengths, group, window, tiles or Tiles(16, 64, 4, 3), programs)


@given(
    STEPS,
    st.integers(1, 9),
    st.sampled_from([None, 1, 40, 10_000]),
    st.sampled_from([16, 128]),
    st.integers(1, 70),
)
def test_every_row_gets_every_token_that_it_sees_once(step, group, window, rows, programs):
    tiles = Tiles(rows, 32, 4, 3)
    work = divided(step, group, window, tiles, programs)
    spans = defaultdict(list)
    for sequence, row, row_end, shift, start, end, _, split in work.items.tolist():
        spans[sequence, row, row_end, shift].append((split, start, end))
    starts = np.concatenate([[0], np.cumsum([n for n, _ in step])])
    expected = set()
    for i, (new, old) in enumerate(step):
        first, last, shift = starts[i] * group, starts[i + 1] * group, old - starts[i]
        expected |= {(i, row, last, shift) for row in range(first, last, rows)}
        assert first // group + shift == old
        assert (last - 1) // group + shift == old + new - 1
    assert spans.keys() == expected
    for (_, row, row_end, shift), parts in spans.items():
        parts.sort()
        assert [split for split, _, _ in parts] == list(range(len(parts)))
        assert all(a[2] == b[1] for a, b in pairwise(parts))
        assert all(start < end for _, start, end in parts)
        first, last = row // group, (min(row + rows, row_end) - 1) // group
        assert parts[0][1] == (0 if window is None else max(first + shift - window + 1, 0))
        assert parts[-1][2] == last + shift + 1


@given(STEPS, st.integers(1, 70))
def test_the_room_for_items_and_partial_results_is_enough(step, programs):
    work = divided(step, programs=programs)
    tiles = len({(sequence, row) for sequence, row, *_ in work.items.tolist()})
    assert len(work.items) <= tiles + programs
    assert work.items[:, 6].max() < 2 * programs
    padded = work.padded(tiles, programs)
    assert len(padded.items) == tiles + programs
    assert len(padded.merges) == tiles
    assert not padded.items[len(work.items) :].any()


@given(STEPS, st.integers(1, 70))
def test_partial_results_have_places_of_their_own_and_are_all_merged(step, programs):
    work = divided(step, programs=programs)
    written = {
        place: (row, row_end)
        for _, row, row_end, _, _, _, place, _ in work.items.tolist()
        if place >= 0
    }
    assert len(written) == (work.items[:, 6] >= 0).sum()
    merged = {}
    for row, row_end, place, count in work.merges.tolist():
        assert count > 1
        merged |= dict.fromkeys(range(place, place + count), (row, row_end))
    assert merged == written


def test_a_batch_that_fills_the_chip_is_not_split():
    assert not len(divided([(1, 4095)] * 40).merges)
    assert not len(divided([(2048, 0)] * 2, tiles=Tiles(128, 64, 8, 3)).merges)


def test_few_long_decodes_are_split_over_the_chip():
    work = divided([(1, 99_999)], programs=33)
    assert 30 <= len(work.items) <= 34
    lengths = work.items[:, 5] - work.items[:, 4]
    assert lengths.max() - lengths.min() < lengths.max() / 2


def test_the_one_long_decode_among_many_is_split():
    work = divided([(1, 99_999)] + [(1, 100)] * 64, programs=33)
    assert len(work.merges) == 1
    assert (work.items[:, 5] - work.items[:, 4]).max() < 5000


def test_what_is_short_is_not_split():
    assert not len(divided([(1, LEAST_SPLIT - 1)]).merges)


def test_the_longest_come_first():
    lengths = np.subtract(*divided([(1, 10), (1, 900), (40, 2000)]).items[:, [5, 4]].T)
    assert (np.diff(lengths) <= 0).all()
