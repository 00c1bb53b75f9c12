"""The numbers are those of the requests, and doubts are said."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from pageloom.bench.http.page import make_page
from pageloom.bench.http.report import Report, as_json
from pageloom.bench.http.run import Run, Settings
from pageloom.bench.http.slo import keeps, parse_slo
from pageloom.bench.http.target import Outcome, Target
from pageloom.bench.http.text import failures, notes, table
from pageloom.bench.machine import Machine
from pageloom.bench.serving.trace import TraceRequest
from pageloom.errors import PageloomError

MACHINE = Machine("cpu", 1, 1, None, "system", "3", "2", "0", None)
FAST, SLOW = Target("fast", "http://f/v1", "m"), Target("slow", "http://s/v1", "m")


def outcome(number, pace, **changes):
    """A request that is due at ``number`` seconds, gets a token every ``pace`` seconds."""
    times = [number + pace * (index + 1) for index in range(4)]
    return replace(Outcome(number, number + 0.001, times[-1] + pace, times, 10, 4, 4), **changes)


def run(pace, **changes):
    return Run(20.0, [outcome(number, pace * (number + 1)) for number in range(10)], **changes)


def report(rounds, targets=(FAST,), slo=None):
    trace = [TraceRequest((1,) * 10, 4, arrival=float(number)) for number in range(10)]
    return Report(targets, trace, rounds, slo or {}, Settings(1.0, True, 0), MACHINE)


def values(found):
    return {row.key: row.values[0] for row in found.rows}


def test_each_metric_is_of_its_requests():
    shown = values(report([{"fast": run(0.1)}]))
    paces = 0.1 * np.arange(1, 11)
    for percentile in (50, 90, 99):
        expected = float(np.percentile(paces, percentile))
        assert shown[f"ttft_p{percentile}"] == pytest.approx(expected)
        assert shown[f"tpot_p{percentile}"] == pytest.approx(expected)
        assert shown[f"e2e_p{percentile}"] == pytest.approx(5 * expected)
    assert shown["itl_p50"] == pytest.approx(float(np.percentile(np.repeat(paces, 3), 50)))
    assert shown["requests_per_second"] == 10 / 20
    assert shown["output_tokens_per_second"] == 40 / 20
    assert shown["cached_share"] == pytest.approx(0.4)
    assert shown["failed"] == 0
    assert shown["late_p99"] == pytest.approx(0.001)


def test_a_late_client_counts_as_a_wait():
    late = outcome(0, 0.5, sent=0.4)
    assert (late.ttft, late.e2e, late.late) == (0.5, 2.5, 0.4)
    doubts = "\n".join(notes(report([{"fast": Run(3.0, [late] * 10)}])))
    assert "The client was too slow for fast: 1 % of the requests were sent 0.400 s" in doubts
    assert "too slow" not in "\n".join(notes(report([{"fast": run(0.1)}])))


def test_failed_requests_count_only_as_failed():
    bad = outcome(9, 90.0, error="status 500", detail="boom")
    done = Run(20.0, [outcome(number, 0.1) for number in range(9)] + [bad])
    found = report([{"fast": done}], slo={"ttft": 100.0})
    shown = values(found)
    assert shown["failed"] == 1
    assert shown["ttft_p99"] == pytest.approx(0.1)
    assert shown["output_tokens_per_second"] == 36 / 20
    assert shown["goodput"] == 9 / 20
    assert list(failures(found)) == ["Failed at fast: 1 request, status 500 (the first: boom)."]
    assert as_json(found)["errors"] == {"fast": {"status 500": 1}}


def test_goodput_is_of_those_that_keep_every_limit():
    shown = values(report([{"fast": run(0.1)}], slo=parse_slo("ttft=0.75, tpot=0.45")))
    assert shown["goodput"] == 4 / 20
    assert shown["slo_share"] == 0.4
    single = outcome(0, 0.1, token_times=[0.1], output_tokens=1)
    assert single.tpot is None
    assert keeps(single, {"tpot": 0.01})
    assert not keeps(single, {"e2e": 0.01})


@pytest.mark.parametrize("text", ["", "ttft", "ttft=", "ttft=0", "ttft=inf", "p99=1", "ttft=1,"])
def test_what_is_no_slo(text):
    with pytest.raises(PageloomError, match="each part must be ttft, tpot or e2e"):
        parse_slo(text)


def test_ratios_are_over_requests_that_all_answered():
    rounds = []
    for number in range(2):
        slow = run(0.2)
        slow.outcomes[number] = replace(slow.outcomes[number], error="timeout")
        rounds.append({"fast": run(0.1), "slow": slow})
    rows = {row.key: row for row in report(rounds, (FAST, SLOW)).rows}
    for key in ("ttft_p50", "ttft_p99", "tpot_p90", "e2e_p50"):
        assert rows[key].ratios[0].value == pytest.approx(2.0), key
        assert rows[key].ratios[0].rounds == 2
    assert rows["requests_per_second"].ratios[0].value == pytest.approx(0.9)
    assert rows["failed"].ratios == [None]


def test_servers_that_answered_nothing_have_no_numbers():
    dead = Run(1.0, [outcome(n, 0.1, error="no connection", token_times=()) for n in range(10)])
    found = report([{"fast": dead, "slow": run(0.1)}], (FAST, SLOW))
    rows = {row.key: row for row in found.rows}
    assert rows["ttft_p50"].values == [None, pytest.approx(0.55)]
    assert rows["ttft_p50"].ratios == [None]
    assert rows["output_tokens_per_second"].ratios == [None]
    assert table(found)[0] == ["", "fast", "slow", "/ fast"]


def test_a_server_that_does_not_count_is_named():
    guessed = outcome(0, 0.1, prompt_tokens=None, cached_tokens=None)
    found = report([{"fast": Run(20.0, [guessed] * 10)}])
    assert any("fast did not say how many tokens 10 of its" in note for note in notes(found))
    assert values(found)["cached_share"] is None


def test_the_page_and_the_json_have_it_all():
    from pageloom.bench.http.figures import draw

    done = Run(20.0, [*run(0.1).outcomes[:9], outcome(9, 1.0, error="timeout", detail="<b>")])
    found = report([{"fast": done, "slow": run(0.2)}], (FAST, SLOW), slo={"ttft": 0.5})
    images = draw(found)
    assert all(data.startswith(b"\x89PNG") for data in images.values())
    page = make_page(found).as_html(images)
    assert "Failed at fast: 1 request, timeout (the first: &lt;b&gt;)" in page
    assert page.count("data:image/png;base64,") == len(images) == 2
    assert "http://" not in page.replace("http://f/v1", "").replace("http://s/v1", "")
    data = json.loads(json.dumps(as_json(found)))
    (first,) = data["rounds"]
    assert first["fast"]["requests"][3]["token_times"] == pytest.approx(
        done.outcomes[3].token_times
    )
    assert {row["metric"] for row in data["summary"]} == {row.key for row in found.rows}
