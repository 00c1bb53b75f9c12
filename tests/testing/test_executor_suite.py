"""The suite passes a sound executor, and fails bad ones in the test that says why."""

from __future__ import annotations

import re
from collections import defaultdict

pytest_plugins = ["pytester"]

EXECUTORS = """
from pageloom.contract import WorkerError
from pageloom.testing import ExecutorSuite
from pageloom_executors.local import LocalExecutor


class Sound(LocalExecutor):
    pass


class RefusesWhatItCanRun(LocalExecutor):
    @classmethod
    def check(cls, blueprint):
        return "does not like it"


class MixesUpOutputs(LocalExecutor):
    max_in_flight = 2

    def receive(self):
        return self._outputs.pop()


class ForgetsASequence(LocalExecutor):
    def receive(self):
        output = super().receive()
        del output.token_ids[50:]
        return output


class MakesASmallerCache(LocalExecutor):
    def allocate(self, num_blocks, host_blocks):
        super().allocate(num_blocks - 1, host_blocks)


class GoesBackInTime(LocalExecutor):
    now = 0.0

    def clock(self):
        self.now -= 1
        return self.now


class StaysOpen(LocalExecutor):
    def close(self):
        pass


class KeepsReasonsToItself(LocalExecutor):
    def start(self, blueprint):
        try:
            return super().start(blueprint)
        except ValueError:
            raise WorkerError("it cannot be loaded") from None
"""

SUITE = """

class Test{0}(ExecutorSuite):
    sizes = [(1, 1)]

    def executor(self):
        return {0}({0}.Config())
"""

CAUGHT = {
    "RefusesWhatItCanRun": {"says_what_it_can_run"},
    "MixesUpOutputs": {"computes_steps"},
    "ForgetsASequence": {"computes_steps"},
    "MakesASmallerCache": {"computes_steps", "leaves_nothing_behind"},
    "GoesBackInTime": {"computes_steps"},
    "StaysOpen": {"leaves_nothing_behind"},
    "KeepsReasonsToItself": {"says_why_a_model_cannot_be_loaded"},
}


def test_each_fault_is_caught_where_it_belongs(pytester):
    classes = "".join(SUITE.format(name) for name in ["Sound", *CAUGHT])
    pytester.makepyfile(test_executors=EXECUTORS + classes)
    output = pytester.runpytest_subprocess("-q", "-p", "no:cacheprovider", "--tb=no").stdout.str()
    caught = defaultdict(set)
    for name, test in re.findall(r"^FAILED test_executors.py::Test(\w+)::test_(\w+)", output, re.M):
        caught[name].add(test)
    assert caught == CAUGHT
    assert " passed" in output
