"""What a simulation measures, in arrays: a few bytes per request, and none per step."""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pageloom.contract import RequestRecord
from pageloom.contract.costs import StepWork
from pageloom.scheduling import StepPlan

OUTPUT_WEIGHT = 2  # what an output token counts, where a prompt token counts 1

Floats = NDArray[np.float32]


@dataclass
class Measured:
    """What came of a load, or of a part of it. Times are simulated seconds."""

    ttft: Floats  # by finished request, in no order that means anything
    tpot: Floats  # likewise; NaN for outputs of one token
    e2e: Floats
    queued: Floats  # until they were first scheduled
    tenant: NDArray[np.int32]
    counts: Counter[str]  # steps, tokens and so on, see `Meter`
    rejected: Counter[str]  # by tenant
    busy: float  # summed over replicas
    ended: float  # when the last request finished
    service: dict[int, Counter[str]] = field(default_factory=dict)
    """By window of time and tenant: tokens, output tokens counting `OUTPUT_WEIGHT`."""
    backlogged: dict[int, set[str]] = field(default_factory=dict)
    """By window: tenants who had a request waiting at one replica all the time."""

    @classmethod
    def merge(cls, parts: list[Measured]) -> Measured:
        """One of disjoint parts of the replicas."""
        service: dict[int, Counter[str]] = defaultdict(Counter)
        backlogged: dict[int, set[str]] = defaultdict(set)
        for part in parts:
            for window, served in part.service.items():
                service[window].update(served)
            for window, tenants in part.backlogged.items():
                backlogged[window] |= tenants
        return cls(
            ttft=np.concatenate([part.ttft for part in parts]),
            tpot=np.concatenate([part.tpot for part in parts]),
            e2e=np.concatenate([part.e2e for part in parts]),
            queued=np.concatenate([part.queued for part in parts]),
            tenant=np.concatenate([part.tenant for part in parts]),
            counts=sum((part.counts for part in parts), Counter()),
            rejected=sum((part.rejected for part in parts), Counter()),
            busy=sum(part.busy for part in parts),
            ended=max(part.ended for part in parts),
            service=dict(service),
            backlogged=dict(backlogged),
        )


class Log:
    """What all replicas of one process have in common."""

    def __init__(self, tenants: list[str], window: float) -> None:
        """``window`` is in seconds, see `Measured.service`."""
        self.window = window
        self.tenants = {name: number for number, name in enumerate(tenants)}
        self.ttft, self.tpot, self.e2e, self.queued = (array("f") for _ in range(4))
        self.tenant = array("i")
        self.counts: Counter[str] = Counter()
        self.rejected: Counter[str] = Counter()
        self.busy = 0.0
        self.ended = 0.0
        self.service: dict[int, Counter[str]] = defaultdict(Counter)
        self.backlogged: dict[int, set[str]] = defaultdict(set)

    def result(self) -> Measured:
        return Measured(
            np.frombuffer(self.ttft, dtype=np.float32),
            np.frombuffer(self.tpot, dtype=np.float32),
            np.frombuffer(self.e2e, dtype=np.float32),
            np.frombuffer(self.queued, dtype=np.float32),
            np.frombuffer(self.tenant, dtype=np.int32),
            self.counts,
            self.rejected,
            self.busy,
            self.ended,
            dict(self.service),
            dict(self.backlogged),
        )


class Meter:
    """Of one replica, which tells what it does and when."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._per_tenant = len(log.tenants) > 1
        self._waiting: Counter[str] = Counter()  # requests by tenant
        self._always: set[str] = set()  # tenants who had some since the window began
        self._window = 0
        self._service = log.service[0]

    def waits(self, tenant: str) -> None:
        self._waiting[tenant] += 1

    def planned(self, plan: StepPlan, work: StepWork, seconds: float) -> None:
        log, counts = self._log, self._log.counts
        log.busy += seconds
        counts["steps"] += 1
        counts["computed_tokens"] += work.tokens
        counts["sequences"] += work.sequences
        if plan.preempted:
            counts["preemptions"] += len(plan.preempted)
            counts["swapped_blocks"] += len(plan.swapped_out)
        if self._per_tenant:
            for request in plan.admitted:
                self._leaves(request.user)
            for request in plan.preempted:
                self._waiting[request.user] += 1

    def computed(self, plan: StepPlan) -> None:
        """The plan was carried out."""
        for chunk in plan.chunks:
            request = chunk.branch.request
            recomputed = chunk.num_recomputed if request.num_preemptions else 0
            if recomputed:
                self._log.counts["recomputed_tokens"] += recomputed
            if self._per_tenant:
                decodes = chunk.start >= len(request.prompt_token_ids)
                prompt = 0 if decodes else chunk.num_tokens - recomputed
                self._service[request.user] += prompt + OUTPUT_WEIGHT * chunk.draws

    def passes(self, now: float) -> None:
        """It is ``now``; what follows belongs to the window of that time."""
        window = int(now / self._log.window)
        if window == self._window or not self._per_tenant:
            return
        if self._always:
            self._log.backlogged[self._window] |= self._always
        waiting = {tenant for tenant, count in self._waiting.items() if count}
        for passed in range(self._window + 1, window):
            if waiting:  # nothing happened in them
                self._log.backlogged[passed] |= waiting
        self._always = waiting
        self._window = window
        self._service = self._log.service[window]

    def finished(self, record: RequestRecord) -> None:
        log, arrived = self._log, record.arrived
        first, scheduled = record.first_token, record.first_scheduled
        if first is None or scheduled is None:
            raise RuntimeError(f"request {record.request_id} has output, but no time of its first")
        outputs = record.output_tokens
        log.ttft.append(first - arrived)
        log.e2e.append(record.finished - arrived)
        log.queued.append(scheduled - arrived)
        tpot = (record.finished - first) / (outputs - 1) if outputs > 1 else float("nan")
        log.tpot.append(tpot)
        log.tenant.append(log.tenants[record.user])
        counts = log.counts
        counts["finished"] += 1
        counts["prompt_tokens"] += record.prompt_tokens
        counts["cached_tokens"] += record.cached_tokens
        counts["output_tokens"] += outputs
        log.ended = max(log.ended, record.finished)

    def _leaves(self, tenant: str) -> None:
        self._waiting[tenant] -= 1
        if not self._waiting[tenant]:
            self._always.discard(tenant)
