"""Which replica a request goes to, and how many there are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pageloom.serve.replicas_routing import MARGIN, PrefixHashes, PrefixMap, Router
from pageloom.serve.replicas_scaling import Load, Scaling


def hashes(tokens, salt="", block_size=4):
    found = PrefixHashes(block_size, salt)
    found.extend(tokens)
    return found.hashes


@given(st.lists(st.lists(st.integers(0, 9), max_size=11), max_size=6), st.integers(1, 7))
def test_hashes_do_not_depend_on_the_pieces_that_tokens_come_in(pieces, block_size):
    grown = PrefixHashes(block_size)
    for piece in pieces:
        grown.extend(piece)
    whole = [token for piece in pieces for token in piece]
    assert grown.hashes == hashes(whole, block_size=block_size)
    assert len(grown.hashes) == len(whole) // block_size


def test_a_block_is_known_by_all_that_is_before_it_and_by_the_salt():
    assert hashes([1, 2, 3, 4, 5, 6, 7, 8])[1] != hashes([0, 2, 3, 4, 5, 6, 7, 8])[1]
    assert hashes([1, 2, 3, 4]) != hashes([1, 2, 3, 4], salt="mine")


@given(
    st.lists(st.tuples(st.integers(0, 1), st.lists(st.integers(0, 2), max_size=12))),
    st.lists(st.integers(0, 2), max_size=12),
)
def test_the_map_counts_the_common_blocks_of_what_was_sent(sent, prompt):
    known = PrefixMap()
    for replica, tokens in sent:
        known.add(replica, hashes(tokens, block_size=2), room=1000)
    for replica in (0, 1):
        common = 0
        for number, tokens in sent:
            blocks = 0
            while (
                number == replica
                and 2 * blocks + 2 <= min(len(tokens), len(prompt))
                and tokens[: 2 * blocks + 2] == prompt[: 2 * blocks + 2]
            ):
                blocks += 1
            common = max(common, blocks)
        assert known.count(replica, hashes(prompt, block_size=2)) == common


def test_the_map_keeps_what_was_sent_last_and_the_beginnings_of_it():
    known, old, new = PrefixMap(), hashes(range(12)), hashes(range(100, 112))
    known.add(0, old, room=5)
    known.add(0, new, room=5)
    assert (known.count(0, old), known.count(0, new)) == (2, 3)
    known.add(0, old, room=4)
    assert (known.count(0, old), known.count(0, new)) == (3, 1)


def test_the_longest_cached_prefix_wins_and_then_the_load():
    router, prompt = Router("prefix"), hashes(range(40))
    router.sent(0, prompt[:3], room=100)
    router.sent(1, prompt[:7], room=100)
    router.sent(2, prompt[:7], room=100)
    assert router.choose({0: 0, 1: 3, 2: 2, 3: 0}, prompt) == 2
    assert router.choose({0: 0, 1: 3, 3: 0}, prompt) == 1
    assert router.choose({0: 2, 3: 1}, prompt) == 0
    assert router.choose({0: 2, 3: 1}, hashes(range(50, 90))) == 3


def test_a_cached_prefix_is_given_up_for_a_replica_that_has_far_less_to_do():
    router, prompt = Router("prefix"), hashes(range(40))
    router.sent(0, prompt, room=100)
    assert router.choose({0: MARGIN, 1: 0}, prompt) == 0
    assert router.choose({0: MARGIN + 1, 1: 0}, prompt) == 1
    assert router.choose({0: 60 + MARGIN, 1: 40}, prompt) == 0
    assert router.choose({0: 61 + MARGIN, 1: 40}, prompt) == 1


def test_what_has_died_has_no_prefixes():
    router, prompt = Router("prefix"), hashes(range(40))
    router.sent(0, prompt, room=100)
    router.forget(0)
    assert router.choose({0: 1, 1: 0}, prompt) == 1


def test_round_robin_takes_turns_whatever_the_load():
    router = Router("round_robin")
    assert [router.choose({0: 5, 1: 0, 3: 0}) for _ in range(4)] == [0, 1, 3, 0]
    assert [router.choose({0: 5, 3: 0}) for _ in range(2)] == [3, 0]


def test_least_loaded_takes_turns_among_equals():
    router = Router("least_loaded")
    assert [router.choose({0: 1, 1: 0, 2: 0}) for _ in range(3)] == [1, 2, 1]


def counts(scaling, loads):
    """The number of replicas second by second, where each change is made at once."""
    found = [1]
    for now, (waiting, running) in enumerate(loads):
        found.append(scaling.replicas(Load(found[-1], waiting, waiting + running), float(now)))
    return found[1:]


def test_a_queue_that_stays_adds_replicas_up_to_the_most():
    scaling = Scaling(1, 3, seats=8, up_after=2, down_after=5)
    assert counts(scaling, [(9, 8)] * 9) == [1, 1, 2, 2, 2, 3, 3, 3, 3]


def test_a_queue_that_is_gone_at_once_adds_none():
    scaling = Scaling(1, 3, seats=8, up_after=2, down_after=5)
    assert counts(scaling, [(9, 8), (9, 8), (0, 8)] * 4) == [1] * 12


def test_replicas_that_are_not_needed_go_one_by_one_down_to_the_least():
    scaling = Scaling(1, 3, seats=8, up_after=0, down_after=2)
    busy, calm = [(99, 8)] * 2, [(0, 3)] * 9
    assert counts(scaling, busy + calm) == [2, 3, 3, 3, 2, 2, 2, 1, 1, 1, 1]


def test_none_goes_while_the_others_would_be_full():
    scaling = Scaling(1, 2, seats=8, up_after=0, down_after=2)
    assert counts(scaling, [(99, 8), *[(0, 5)] * 9]) == [2] * 10
