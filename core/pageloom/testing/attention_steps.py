"""Steps that an engine may ask of a backend, played on a `Rig`."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from pageloom.testing.attention_rig import Rig
from pageloom.testing.attention_shadow import Branch

LONGEST = 8192  # tokens of context that are tried


def mixed_steps(rig: Rig) -> None:
    """Decodes, chunked prefills and prefix hits in the same calls, with blocks that are shared,
    copied, swapped, freed and reused. Lengths go by the block size."""
    size = rig.spec.block_size
    unit = size if 8 <= size <= 256 else 16
    old, chunked, fresh = Branch(), Branch(), Branch()
    rig.step((old, 2 * unit + unit // 2), (chunked, 1))
    hit, twin = rig.fork(old, 2 * unit), rig.fork(old)
    rig.step((chunked, unit - 2), (old, 1), (hit, 5), (fresh, unit + 1), (twin, 1))
    first, *followers = prefix_in_same_step(rig, 2 * unit, 2)
    rig.step((followers[0], 7), (followers[1], 1), (old, 1), (first, 2 * unit + 3), (chunked, 4))
    rig.swap(twin)
    rig.step((twin, 2), (fresh, 1), (hit, 1), (followers[0], 1), (old, 3))
    rig.free(fresh)
    again = Branch()
    rig.step((again, unit), (first, 1), (twin, 1))
    rig.step(*((b, 1) for b in (old, chunked, hit, twin, first, *followers, again)))


def prefix_in_same_step(rig: Rig, tokens: int, followers: int) -> list[Branch]:
    """An empty branch with blocks for a little more than ``tokens``, and branches that begin with
    its first full blocks, before anyone has written them."""
    first = Branch()
    rig.reserve(first, tokens + 3)
    full = tokens - tokens % rig.spec.block_size
    return [first, *(rig.fork(first, full) for _ in range(followers))]


def contexts_that_end_near(rig: Rig, target: int, distinct: int, chunk: int) -> None:
    """Sequences of about ``target`` tokens that end before, on and after block edges.

    They share what they can of one prefix, of which ``distinct`` blocks are drawn and the others
    are copies. Each is tried as a decode and as a chunk; the longest also alone, and as a long
    chunk.
    """
    size = rig.spec.block_size
    edge = target - target % size
    near = (target, edge - size + 1, edge - 1, edge, edge + 1)
    ends = sorted({end for end in near if 1 <= end <= LONGEST})
    base = rig.fill(ends[-1], distinct)
    alone = rig.fork(base, ends[-1] - 1)
    rig.step((alone, 1))
    rig.free(alone)
    work = []
    for end, n in [(ends[-1], chunk), *((end, n) for end in ends for n in (1, 5))]:
        n = min(n, end)
        work.append((rig.fork(base, end - n), n))
    rig.step(*work)


def copied_blocks(rig: Rig) -> None:
    """Blocks of three sequences are copied in one call, one of them twice."""
    branches = [Branch() for _ in range(3)]
    rig.step(*((b, n) for b, n in zip(branches, (1, 9, 14), strict=True)))
    before = rig.read(rig.pool).clone()
    pairs = [(branch.blocks[0], rig.take()) for branch in (*branches, branches[1])]
    rig.copy(pairs)
    after = rig.read(rig.pool)
    for source, target in pairs:
        before[rig.pool.index(target)] = before[rig.pool.index(source)]
    exact = torch.equal(after, before)
    assert exact, "copy_blocks must make the targets like the sources, and change no other block"
    copies = [Branch([target], b.length) for (_, target), b in zip(pairs, branches, strict=False)]
    for branch in branches:
        rig.free(branch)
    rig.step(*((copy, 1) for copy in copies))


def swapped_blocks(rig: Rig) -> None:
    """Blocks are read together, and written back to other places one by one and in parts."""
    first, second = Branch(), Branch()
    rig.step((first, 35), (second, 3))
    rig.swap(first)
    rig.step((first, 1), (second, 1))
    rig.swap(second)
    rig.step((second, 4), (first, 1))

    expected = rig.read(rig.pool).clone()
    data = rig.read([first.blocks[0], second.blocks[0], first.blocks[-1]])
    targets = [rig.take() for _ in range(3)]
    rig.write(targets[:2], data[[2, 0]])
    rig.write(targets[2:], data[1:2])
    for target, row in zip(targets, (2, 0, 1), strict=True):
        expected[rig.pool.index(target)] = data[row]
    exact = torch.equal(rig.read(rig.pool), expected)
    assert exact, "write_blocks must make blocks as they were read, and change no other block"


def rotated_steps(rig: Rig) -> None:
    """A prompt, a chunk and decodes, which see tokens of steps before."""
    first, second = Branch(), Branch()
    rig.step((first, 40), (second, 1))
    rig.step((second, 21), (first, 1))
    rig.step((second, 1), (first, 1))


def draw_steps(data: st.DataObject, rig: Rig) -> None:
    """A few ragged steps, between which branches fork, swap and end."""
    longest, size = rig.spec.max_model_len, rig.spec.block_size
    branches: list[Branch] = []
    for _ in range(data.draw(st.integers(1, 4), "steps")):
        _draw_move(data, rig, branches)
        if len(branches) < 5:
            branches.append(Branch())
        wanted = [data.draw(st.sampled_from([0, 1, 1, 2, 7, 16, 23])) for _ in branches]
        work = [(b, n) for b, n in zip(branches, wanted, strict=True) if n]
        work = [(b, n) for b, n in work if b.length + n <= longest]
        # A follower of a branch that is about to write at least one full block.
        leaders = [(b, b.length + n) for b, n in work if b.length + n >= size]
        if leaders and len(branches) < 6 and data.draw(st.booleans(), "same step"):
            leader, length = data.draw(st.sampled_from(leaders))
            rig.reserve(leader, length)
            full = length - length % size
            if full < longest:
                branches.append(rig.fork(leader, full))
                n = data.draw(st.integers(1, min(9, longest - full)))
                work.insert(data.draw(st.integers(0, len(work))), (branches[-1], n))
        if work:
            rig.step(*work)


def _draw_move(data: st.DataObject, rig: Rig, branches: list[Branch]) -> None:
    action = data.draw(st.sampled_from(["none", "fork", "swap", "free"]))
    live = [branch for branch in branches if branch.length]
    if not live or action == "none":
        return
    chosen = data.draw(st.sampled_from(live))
    if action == "fork":
        branches.append(rig.fork(chosen, data.draw(st.integers(1, chosen.length))))
    elif action == "swap":
        rig.swap(chosen)
    else:
        rig.free(chosen)
        branches.remove(chosen)
