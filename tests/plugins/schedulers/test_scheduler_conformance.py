"""The schedulers in the box, by the suite that anyone's must pass."""

from __future__ import annotations

from pageloom.testing import SchedulerSuite
from pageloom_schedulers.fair import Fair
from pageloom_schedulers.fcfs import FCFS
from pageloom_schedulers.policy import Victim
from pageloom_schedulers.priority import Priority
from pageloom_schedulers.sjf import SJF
from pageloom_schedulers.tokens import PrefillShare

OTHERS = {"victim": Victim.least_computed, "prefill_share": PrefillShare.adaptive}


class TestFCFS(SchedulerSuite):
    def scheduler(self):
        return FCFS(FCFS.Config())


class TestFCFSWithOtherOptions(SchedulerSuite):
    def scheduler(self):
        return FCFS(FCFS.Config(**OTHERS))


class TestPriority(SchedulerSuite):
    def scheduler(self):
        return Priority(Priority.Config())


class TestPriorityWithOtherOptions(SchedulerSuite):
    def scheduler(self):
        return Priority(Priority.Config(**OTHERS, ageing_seconds=2.0))


class TestSJF(SchedulerSuite):
    def scheduler(self):
        return SJF(SJF.Config())


class TestSJFWithOtherOptions(SchedulerSuite):
    def scheduler(self):
        return SJF(SJF.Config(**OTHERS, ageing_tokens_per_second=1.0))


class TestFair(SchedulerSuite):
    def scheduler(self):
        return Fair(Fair.Config())


class TestFairWithOtherOptions(SchedulerSuite):
    def scheduler(self):
        return Fair(Fair.Config(**OTHERS, ageing_tokens_per_second=1.0))
