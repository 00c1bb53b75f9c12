"""Traces are repeatable, do not depend on a model, and say what is wrong with a file."""

from __future__ import annotations

import json
from itertools import pairwise
from statistics import mean

import pytest

from pageloom.bench.serving.trace import (
    TraceRequest,
    draw_token_ids,
    parse_span,
    random_trace,
    read_trace,
    with_poisson_arrivals,
)
from pageloom.errors import PageloomError


def shape(trace):
    return [(len(request.prompt), request.output_tokens) for request in trace]


def test_the_built_in_trace_is_what_it_says():
    trace = draw_token_ids(random_trace(), 49152)
    assert len(trace) == 64
    prompts, outputs = zip(*shape(trace), strict=True)
    assert 50 <= min(prompts) < 80 < 470 < max(prompts) <= 500
    assert 16 <= min(outputs) < 30 < 190 < max(outputs) <= 200
    assert {request.arrival for request in trace} == {0.0}
    assert all(17 <= token_id < 49152 for request in trace for token_id in request.prompt)


def test_a_trace_repeats_and_its_lengths_depend_on_the_seed_alone():
    assert draw_token_ids(random_trace(), 500) == draw_token_ids(random_trace(), 500)
    assert shape(draw_token_ids(random_trace(), 500)) == shape(draw_token_ids(random_trace(), 90))
    assert random_trace(seed=1) != random_trace()
    first, second = draw_token_ids(random_trace(2), 500)
    assert first.prompt[:10] != second.prompt[:10]


def test_prompts_of_a_group_share_their_prefix_and_nothing_else():
    trace = draw_token_ids(random_trace(6, prefix_tokens=40, prefix_groups=2), 49152)
    plain = draw_token_ids(random_trace(6), 49152)
    assert {request.prompt[:40] for request in trace[::2]} == {trace[0].prompt[:40]}
    assert {request.prompt[:40] for request in trace[1::2]} == {trace[1].prompt[:40]}
    assert trace[0].prompt[:40] != trace[1].prompt[:40]
    assert [request.prompt[40:] for request in trace] == [request.prompt for request in plain]


def test_poisson_arrivals_come_at_the_rate():
    arrivals = [request.arrival for request in with_poisson_arrivals(random_trace(4000), 5.0)]
    assert arrivals == sorted(arrivals)
    gaps = [after - before for before, after in pairwise(arrivals)]
    assert mean(gaps) == pytest.approx(1 / 5, rel=0.05)
    # The gaps of a Poisson process are exponential: their deviation equals their mean.
    assert mean((gap - 1 / 5) ** 2 for gap in gaps) ** 0.5 == pytest.approx(1 / 5, rel=0.1)


@pytest.mark.parametrize("rate", [0, -1, float("inf"), float("nan")])
def test_a_rate_that_is_none_is_refused(rate):
    with pytest.raises(PageloomError, match="must be above 0 requests per second"):
        with_poisson_arrivals(random_trace(), rate)


def test_spans():
    assert parse_span("50:500", "--x") == (50, 500)
    assert parse_span("8", "--x") == (8, 8)
    for text in ("", "0", "9:5", "a:b", "1:2:3", "-4:4"):
        with pytest.raises(PageloomError, match=r"--x is .*such as 50:500"):
            parse_span(text, "--x")


def test_a_file_has_texts_token_ids_or_counts_and_comes_in_order_of_arrival(tmp_path):
    path = tmp_path / "trace.jsonl"
    entries = [
        {"prompt": "Hello", "output_tokens": 3, "arrival": 2},
        {"prompt": [1, 2, 3], "output_tokens": 4, "user": "a", "priority": -1},
        {"prompt_tokens": 30, "output_tokens": 5, "arrival": 0.5},
    ]
    path.write_text("\n\n".join(json.dumps(entry) for entry in entries) + "\n")
    ids, count, text = draw_token_ids(read_trace(path), 96)
    assert ids == TraceRequest((1, 2, 3), 4, 0.0, "a", -1)
    assert text == TraceRequest("Hello", 3, 2)
    assert (len(count.prompt), count.output_tokens, count.arrival) == (30, 5, 0.5)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "must be a JSON object, not [1]"),
        ('{"output_tokens": 1}', "needs either prompt or prompt_tokens"),
        ('{"prompt": "a", "prompt_tokens": 2, "output_tokens": 1}', "needs either"),
        ('{"prompt": "a"}', "output_tokens is missing; it must be an integer of 1 or more"),
        ('{"prompt": "a", "output_tokens": 0}', "output_tokens is 0, but must be an integer"),
        ('{"prompt": "a", "output_tokens": true}', "output_tokens is true"),
        ('{"prompt": "", "output_tokens": 1}', 'prompt is "", but must be a text or a list'),
        ('{"prompt": [], "output_tokens": 1}', "prompt is []"),
        ('{"prompt": [1, "b"], "output_tokens": 1}', 'prompt is [1, "b"]'),
        ('{"prompt": "a", "output_token": 1}', "did you mean 'output_tokens'?"),
        ('{"prompt": "a", "output_tokens": 1, "arrival": -1}', "arrival is -1, but must be"),
        ('{"prompt": "a", "output_tokens": 1, "arrival": NaN}', "arrival is NaN"),
        ('{"prompt": "a", "output_tokens": 1, "user": null}', "user is null, but must be a text"),
        ('{"prompt": "a", "output_tokens": 1, "priority": 0.5}', "priority is 0.5"),
    ],
)
def test_a_line_that_is_wrong_is_named(tmp_path, line, message):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"prompt": "a", "output_tokens": 1}\n' + line + "\n")
    with pytest.raises(PageloomError) as raised:
        read_trace(path)
    assert f"{path}, line 2: " in str(raised.value)
    assert message in str(raised.value)


def test_a_file_without_requests_is_refused(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n \n")
    with pytest.raises(PageloomError, match="holds no request"):
        read_trace(tmp_path / "empty.jsonl")
    with pytest.raises(PageloomError, match="cannot be read"):
        read_trace(tmp_path / "nothing.jsonl")
