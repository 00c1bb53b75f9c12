"""The suite passes a sound policy, and fails bad ones in the test that says why."""

from __future__ import annotations

import re
from collections import defaultdict

pytest_plugins = ["pytester"]

QUICK = """
from hypothesis import Phase, settings

settings.register_profile("quick", phases=[Phase.generate])  # failures need not be shrunk
settings.load_profile("quick")
"""

POLICIES = """
import random

from pageloom.contract import Scheduler
from pageloom.testing import SchedulerSuite


class Sound(Scheduler):
    # First come, first served; the last admitted gives way.
    skips = False

    def schedule(self, view, plan):
        for request in view.running:
            while plan.preemptible(request) and not plan.run(request) and plan.refusal == "blocks":
                plan.preempt(next(r for r in reversed(view.running) if plan.preemptible(r)))
        for request in self.arrange(view.waiting):
            if not plan.run(request) and not self.skips:
                break

    def arrange(self, waiting):
        return waiting


class LastInFirstOut(Sound):
    def arrange(self, waiting):
        return reversed(list(waiting))


class ShortestFirst(Sound):
    def arrange(self, waiting):
        return sorted(waiting, key=lambda request: request.prompt_tokens)


class PriorityOnly(Sound):
    def arrange(self, waiting):
        return sorted(waiting, key=lambda request: request.priority)


class SkipsWhatDoesNotFit(Sound):
    skips = True


class EvictsWhoeverRuns(Sound):
    def schedule(self, view, plan):
        if not view.waiting:
            return super().schedule(view, plan)
        for request in view.running:
            plan.preempt(request)
        plan.run(next(iter(view.waiting)), 2)


class NeverRuns(Scheduler):
    def schedule(self, view, plan):
        pass


class RollsDice(Sound):
    def arrange(self, waiting):
        first = sorted(waiting, key=lambda request: request.arrival_time)[:2]
        return random.sample(first, len(first))


class NeverForgets(Sound):
    def __init__(self, config):
        super().__init__(config)
        self.seen = set()

    def schedule(self, view, plan):
        self.seen.update(view.arrived)
        super().schedule(view, plan)


class MissesAborts(Sound):
    # Keeps a queue of its own, and strikes off only whom it admitted.
    def __init__(self, config):
        super().__init__(config)
        self.queue = []

    def schedule(self, view, plan):
        self.queue += view.arrived
        super().schedule(view, plan)

    def arrange(self, waiting):
        yield from [request for request in waiting if request.preemptions]
        while self.queue:
            yield self.queue[0]
            del self.queue[0]
"""

SUITE = """

class Test{0}(SchedulerSuite):
    max_wait = 200

    def scheduler(self):
        return {0}({0}.Config())
"""

CAUGHT = {
    "LastInFirstOut": {"starves_nobody"},
    "ShortestFirst": {"starves_nobody"},
    "PriorityOnly": {"starves_nobody"},
    "SkipsWhatDoesNotFit": {"starves_nobody"},
    "RollsDice": {"is_deterministic"},
    "NeverForgets": {"forgets_requests_that_ended"},
    "MissesAborts": {"survives_aborts", "is_deterministic", "forgets_requests_that_ended"},
    "EvictsWhoeverRuns": {
        "never_livelocks",
        "serves_every_request",
        "survives_aborts",
        "is_deterministic",
        "starves_nobody",
        "forgets_requests_that_ended",
    },
    "NeverRuns": {
        "serves_a_request_alone",
        "never_livelocks",
        "serves_every_request",
        "survives_aborts",
        "is_deterministic",
        "starves_nobody",
        "forgets_requests_that_ended",
    },
}


def test_each_fault_is_caught_where_it_belongs(pytester):
    """The tests that should find it do; all are run of a sound policy and of some others."""
    classes = "".join(SUITE.format(name) for name in ["Sound", *CAUGHT])
    pytester.makepyfile(test_policies=QUICK + POLICIES + classes)
    chosen = [f"Test{policy}::test_{test}" for policy, tests in CAUGHT.items() for test in tests]
    whole = ("TestSound", "TestPriorityOnly", "TestMissesAborts")
    files = [f"test_policies.py::{name}" for name in (*whole, *chosen)]
    output = pytester.runpytest_subprocess(
        "-q", "-p", "no:cacheprovider", "--tb=no", *files
    ).stdout.str()
    caught = defaultdict(set)
    for policy, test in re.findall(
        r"^FAILED test_policies.py::Test(\w+)::test_(\w+)", output, re.M
    ):
        caught[policy].add(test)
    assert caught == CAUGHT
    assert " passed" in output
