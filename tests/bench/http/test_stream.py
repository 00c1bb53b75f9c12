"""A stream is read as it is, however its bytes were cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_server import DONE, event, token, usage

from pageloom.bench.http.stream import Block, Received, StreamError

STREAM = token("a") + token("é") + token("", finish_reason="length") + usage(9, 3, 4) + DONE


def blocks(*parts):
    return [Block(float(number), part) for number, part in enumerate(parts)]


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_an_event_came_with_the_block_that_completes_its_line(cuts):
    edges = [0, *sorted(cuts), len(STREAM)]
    parts = [STREAM[low:high] for low, high in pairwise(edges)]
    received = Received.read(blocks(*parts))
    assert (received.prompt_tokens, received.cached_tokens, received.output_tokens) == (9, 4, 3)
    # The line of an event ends a byte before the event does.
    ends = [len(token("a")) - 1, len(token("a") + token("é")) - 1]
    assert received.token_times == [
        float(next(number for number, edge in enumerate(edges[1:]) if edge >= end)) for end in ends
    ]


def test_other_lines_and_line_ends_do_not_matter():
    stream = b": ping\r\n\r\nevent: x\r\n" + (token() + usage(2, 1) + DONE).replace(b"\n", b"\r\n")
    received = Received.read(blocks(stream))
    assert (received.token_times, received.output_tokens) == ([0.0], 1)


def test_a_server_need_not_count():
    received = Received.read(blocks(token(), token(), DONE))
    assert (received.token_times, received.output_tokens) == ([0.0, 1.0], None)
    assert received.prompt_tokens is received.cached_tokens is None


def test_tokens_that_are_no_text_yet_are_tokens():
    received = Received.read(blocks(token(""), token("", finish_reason="length"), DONE))
    assert received.token_times == [0.0]


@pytest.mark.parametrize(
    ("stream", "kind", "message"),
    [
        ([token()], "stream without its end", "without"),
        ([], "stream without its end", "without"),
        ([event({"error": {"message": "no luck"}}), DONE], "error in the stream", "no luck"),
        ([event({"error": "no luck"})], "error in the stream", "no luck"),
        ([b"data: {oh\n\n", DONE], "event that is not JSON", "oh"),
        ([b"data: 3\n\n", DONE], "event that is not JSON", "3"),
        ([b"<html>\n</html>"], "stream without its end", "without"),
    ],
)
def test_what_went_wrong_is_said(stream, kind, message):
    with pytest.raises(StreamError, match=message) as caught:
        Received.read(blocks(*stream))
    assert caught.value.kind == kind
