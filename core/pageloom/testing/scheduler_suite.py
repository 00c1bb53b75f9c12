"""What every scheduling policy must do, as a pytest suite to inherit.

For a package that has the policy of `pageloom.contract.scheduler`'s example, two files more.
``pyproject.toml``::

    [project.optional-dependencies]
    test = ["pageloom[testing]"]

``test_lifo.py``::

    from pageloom.testing import SchedulerSuite
    from pageloom_lifo import LastInFirstOut

    class TestLastInFirstOut(SchedulerSuite):
        def scheduler(self):
            return LastInFirstOut(LastInFirstOut.Config())

Then ``pytest``. It tells that this policy starves: whoever came first waits as long as others come.
"""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from itertools import count
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from pageloom.contract import Scheduler
from pageloom.scheduling import Request
from pageloom.scheduling.simulation import SimulatedStep
from pageloom.testing.scenarios import Arrival, Scenario, WatchedSimulation, play, scenarios

# The tests are inherited by many classes; and a slow machine is no fault of a policy.
_explored = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow],
)
_SMALL = {"num_blocks": 20, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 16}

# Who waits, and who keeps coming meanwhile.
_PATIENT = {
    "short": Arrival(prompt=4, output=4, user="patient"),
    "long": Arrival(prompt=40, output=20, user="patient", ignore_eos=True),
    "wide": Arrival(prompt=8, output=8, n=4, user="patient"),
}
_CROWD = {
    "alike": Arrival(user="patient"),
    "short": Arrival(prompt=1, output=2, user="patient"),
    "long": Arrival(prompt=40, output=20, user="patient"),
    "wide": Arrival(n=4, user="patient"),
    "urgent": Arrival(priority=-3, user="patient"),
    "of another tenant": Arrival(user="other"),
    "of ever new tenants": Arrival(user="tenant {}"),
}


class SchedulerSuite(ABC):
    """Inherit it in a class named ``Test...`` and say how a scheduler is made.

    Requests are played through the real control plane without a model, on a clock that gains a
    second in each step, and `KVInvariants` checks each plan. A test that a policy fails on purpose
    is switched off in the subclass with ``test_starves_nobody = None``.
    """

    max_wait = 1000
    """Steps (of a second each) within which any request must end, whoever else comes."""

    @abstractmethod
    def scheduler(self) -> Scheduler:
        """A new instance, with the options to be tested. Called several times in a test."""

    def test_serves_a_request_alone(self) -> None:
        """It ends after about as many steps as it has tokens, at most."""
        scenario = Scenario(_SMALL, (Arrival(prompt=20, output=12, ignore_eos=True),))
        assert len(list(play(self.scheduler(), scenario))) <= 40

    @_explored
    @given(scenario=scenarios())
    def test_serves_every_request(self, scenario: Scenario) -> None:
        """In few steps, within every limit, and no block is lost: with forks, beams, prefix hits,
        swaps and recomputation, in pools that are too small."""
        for _ in play(self.scheduler(), scenario):
            pass

    @_explored
    @given(scenario=scenarios(aborts=True))
    def test_survives_aborts(self, scenario: Scenario) -> None:
        """Requests may vanish between any two steps, running or waiting."""
        for _ in play(self.scheduler(), scenario):
            pass

    @_explored
    @given(scenario=scenarios(aborts=True))
    def test_is_deterministic(self, scenario: Scenario) -> None:
        """Two instances that see the same make the same plans."""
        steps = zip(play(self.scheduler(), scenario), play(self.scheduler(), scenario), strict=True)
        for number, (first, second) in enumerate(steps):
            assert _decisions(first) == _decisions(second), f"step {number} differs"

    @pytest.mark.parametrize("preemption_mode", ["recompute", "swap"])
    @pytest.mark.parametrize("n", [1, 3])
    def test_never_livelocks(self, n: int, preemption_mode: str) -> None:
        """Requests that start together, each of which needs almost the whole pool to end."""
        arrivals = (Arrival(prompt=9, output=24, n=n, ignore_eos=True),) * 6
        limits = _SMALL | {
            "num_blocks": 9 if n == 1 else 21,
            "max_num_seqs": 6 * n,
            "preemption_mode": preemption_mode,
            "host_blocks": 100,
        }
        preemptions = sum(
            len(step.plan.preempted) for step in play(self.scheduler(), Scenario(limits, arrivals))
        )
        tokens = sum(arrival.prompt + n * arrival.output for arrival in arrivals)
        assert preemptions < tokens, "requests are preempted and readmitted in circles"

    @pytest.mark.parametrize("crowd", _CROWD)
    @pytest.mark.parametrize("patient", _PATIENT)
    def test_starves_nobody(self, patient: str, crowd: str) -> None:
        """A request ends within `max_wait` steps, though others keep coming that a policy may
        prefer, and though its tenant was served before."""
        simulation = WatchedSimulation(self.scheduler(), max_model_len=64, **_SMALL)
        names = (f"crowd {number}" for number in count())
        simulation.add(_PATIENT["long"].request("before", simulation.now))
        while simulation.planner.has_requests:
            simulation.step()
        for number in range(20 + self.max_wait):
            if number == 20:
                simulation.add(_PATIENT[patient].request("patient", simulation.now))
            # More than a step can admit, before the patient one and behind it.
            while len(simulation.planner.waiting) < (8 if number < 20 else 16):
                simulation.add(_CROWD[crowd].request(next(names), simulation.now))
            if any(request.request_id == "patient" for request in simulation.step().finished):
                return
        pytest.fail(
            f"a {patient} request has waited for {self.max_wait} steps while {next(names)} "
            f"others came that were {crowd}"
        )

    def test_forgets_requests_that_ended(self) -> None:
        """A policy that keeps state must not grow with the number of requests it has seen."""
        simulation = WatchedSimulation(self.scheduler(), **_SMALL)
        mark = f"{id(simulation)} "
        requests = (
            Arrival(prompt=1 + number % 20, user=f"{number % 3}").request(
                f"{mark}{number}", simulation.now
            )
            for number in range(300)
        )
        for _ in simulation.drive(requests):
            if simulation.planner.waiting:  # the newest goes
                simulation.planner.finish(simulation.planner.waiting.popitem()[1], "abort")
        simulation.add(Arrival(prompt=1, output=1).request("last", simulation.now))
        simulation.step()
        gc.collect()
        kept = [
            each
            for each in gc.get_objects()
            if type(each) is Request and each.request_id.startswith(mark)
        ]
        assert len(kept) < 30, f"{len(kept)} of 300 requests that ended are still referred to"


def _decisions(step: SimulatedStep) -> Any:
    """What a policy decided in a step."""
    return (
        [
            (chunk.branch.request.request_id, chunk.branch.index, chunk.start, chunk.num_tokens)
            for chunk in step.plan.chunks
        ],
        [request.request_id for request in step.plan.preempted],
    )
