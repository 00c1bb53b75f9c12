"""What happened in an engine, so that a test knows it provoked what it is about."""

from __future__ import annotations

from pageloom.contract import hookimpl


class Seen:
    """What happened in an engine: that a test provoked what it is about."""

    def __init__(self):
        self.preempted = self.swapped = self.cached = self.copied = 0

    @hookimpl
    def step_finished(self, record):
        self.preempted += record.preempted
        self.swapped += record.blocks_swapped_in
        self.copied += record.blocks_copied

    @hookimpl
    def request_finished(self, record):
        self.cached += record.cached_tokens


class Records:
    """Whatever an engine tells of its steps and requests."""

    def __init__(self, engine):
        self.steps, self.requests = [], []
        engine.plugins.register_observer(self)

    @hookimpl
    def step_finished(self, record):
        self.steps.append(record)

    @hookimpl
    def request_finished(self, record):
        self.requests.append(record)
