"""Requests whose grammars are compiled beside the steps of the engine process."""

from __future__ import annotations

import select
import threading

import pytest

from pageloom import SamplingParams
from pageloom.serve.preparing import Preparing
from pageloom.serve.wire import Submit

PARAMS = SamplingParams()
PATIENCE = 60_000  # milliseconds


class Compiling:
    """An engine that compiles once it may."""

    def __init__(self):
        self.may = threading.Event()

    def compile_guide(self, params):
        assert self.may.wait(60)
        if params.seed is not None:
            raise ValueError("structured has a regex that cannot be used")
        return


@pytest.fixture
def engine():
    engine = Compiling()
    yield engine
    engine.may.set()


def wait_for(preparing):
    """What is taken once the poll of a worker says that there is something."""
    poller = select.poll()
    poller.register(preparing, select.POLLIN)
    assert poller.poll(PATIENCE)
    return list(preparing.take())


def test_requests_are_taken_when_they_are_compiled(engine):
    preparing = Preparing(engine)
    message = Submit("a", [1], {})
    preparing.start(message, PARAMS)
    assert list(preparing.take()) == []
    assert len(preparing) == 1
    engine.may.set()
    (prepared,) = wait_for(preparing)
    assert prepared.message is message
    assert prepared.guide is None
    assert len(preparing) == 0
    assert list(preparing.take()) == []


def test_what_cannot_be_compiled_says_why(engine):
    engine.may.set()
    preparing = Preparing(engine)
    preparing.start(Submit("a", [1], {}), SamplingParams(seed=1))
    (prepared,) = wait_for(preparing)
    assert str(prepared.guide) == "structured has a regex that cannot be used"


def test_a_cancelled_request_is_not_taken_even_if_its_id_is_in_use_again(engine):
    preparing = Preparing(engine)
    first, second = Submit("a", [1], {}), Submit("a", [2], {})
    preparing.start(first, PARAMS)
    assert preparing.cancel("a")
    assert not preparing.cancel("a")
    preparing.start(second, PARAMS)
    engine.may.set()
    taken = []
    while not taken:
        taken += wait_for(preparing)
    assert [prepared.message for prepared in taken] == [second]
