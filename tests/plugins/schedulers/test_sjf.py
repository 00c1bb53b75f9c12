"""Shortest job first: what is expected of a request, and that waiting counts."""

from __future__ import annotations

from pageloom.scheduling import Request, SamplingParams
from pageloom_schedulers.sjf import SJF
from simulation import make_request, simulate


def sjf(**options):
    return SJF(SJF.Config(**options))


def order(simulation):
    """Names in the order of their first admission."""
    admitted = [r.request_id for plan, _ in simulation.drive([]) for r in plan.admitted]
    return list(dict.fromkeys(admitted))


def test_before_any_request_ended_prompt_and_max_tokens_count():
    simulation = simulate(sjf(), max_num_seqs=1)
    for name, prompt, output in [("a", 20, 20), ("b", 4, 20), ("c", 10, 2), ("d", 4, 30)]:
        simulation.add(make_request(name, prompt, output))
    assert order(simulation) == ["c", "b", "d", "a"]


def test_branches_count_each():
    simulation = simulate(sjf(), max_num_seqs=3)
    params = SamplingParams(n=3, max_tokens=10)
    simulation.add(Request("wide", [0] * 4, params, arrival_time=0.0))
    simulation.add(make_request("narrow", 10, 20))  # 30 tokens, and not 4 + 3 * 10
    simulation.step()
    assert set(simulation.planner.running) == {"narrow"}


def test_the_mean_output_length_is_learned():
    """Once outputs are known to be short, a generous max_tokens is no sign of a long one."""
    simulation = simulate(sjf(), max_num_seqs=1)
    for number in range(20):
        simulation.add(make_request(f"early {number}", 4, 3))
    order(simulation)
    simulation.add(make_request("generous", 4, 50))
    simulation.add(make_request("longer", 20, 2))
    simulation.step()
    assert set(simulation.planner.running) == {"generous"}


def test_waiting_outweighs_work():
    """At 2 tokens a second, 10 seconds make up for 20 tokens."""
    for later, first in [(4.0, "short"), (6.0, "long")]:
        simulation = simulate(sjf(ageing_tokens_per_second=2.0), max_num_seqs=1)
        simulation.add(make_request("long", 20, 4, arrival=0.0))
        simulation.add(make_request("short", 10, 4, arrival=later))
        simulation.step()
        assert set(simulation.planner.running) == {first}


def test_a_preempted_request_has_to_be_computed_again():
    simulation = simulate(sjf(), num_blocks=8, enable_prefix_caching=False)
    simulation.add(make_request("a", 10, 14))
    simulation.add(make_request("b", 12, 20))
    plan, _ = simulation.step()
    while not plan.preempted:
        plan, _ = simulation.step()
    (victim,) = plan.preempted
    assert victim.request_id == "b"
    assert victim.output_tokens > 0
    # It has its output to compute again and that much less to draw: 32 tokens as before.
    simulation.add(make_request("longer", 13, 20))
    simulation.add(make_request("shorter", 11, 20))
    assert order(simulation) == ["shorter", "b", "longer"]
