"""What becomes of ranks and of the engine's process when something goes wrong at either end."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from pageloom.contract import WorkerError
from pageloom.testing.executor_model import (
    HOST_BLOCKS,
    NUM_BLOCKS,
    SumBlueprint,
    SumStep,
    Trouble,
)
from pageloom_executors.crew import Crew
from pageloom_executors.processes import Launch, RankProcess
from pageloom_executors.torch_distributed import TorchDistributedExecutor
from pageloom_executors.wire import Ping, Start, pack

PATIENCE = 60.0  # seconds for processes to be gone, on a busy machine

ENGINE = """
import sys, time
from pageloom.testing.executor_model import *
from pageloom_executors.torch_distributed import TorchDistributedExecutor

executor = TorchDistributedExecutor(TorchDistributedExecutor.Config())
reports = executor.start(SumBlueprint(2))
executor.allocate(NUM_BLOCKS, HOST_BLOCKS)
executor.submit(SumStep([1], trouble=Trouble("sleeps", 0)))
print(*[report.weights["pid"] for report in reports], flush=True)
time.sleep(1000)
"""

LOUD = """
from pageloom.testing.executor_model import *
from pageloom_executors.torch_distributed import TorchDistributedExecutor

class Loud(SumBlueprint):
    def build(self, group, device=None):
        print(f"here is rank {group.rank.index}")
        return super().build(group, device)

def main():
    executor = TorchDistributedExecutor(TorchDistributedExecutor.Config())
    executor.start(Loud(1))
    executor.close()
"""


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # This process reaps its own children; those of others may stay as zombies for a while.
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return not state.stdout.startswith("Z")


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + PATIENCE
    while left := [pid for pid in pids if is_there(pid)]:
        assert time.monotonic() < deadline, f"processes are left behind: {left}"
        time.sleep(0.05)


def children() -> set[int]:
    found = subprocess.run(["pgrep", "-P", str(os.getpid())], capture_output=True, text=True)
    return {int(pid) for pid in found.stdout.split()}


@contextmanager
def started(*size: int, **blueprint: float):
    """An executor that takes steps, and the ids of its processes."""
    executor = TorchDistributedExecutor(TorchDistributedExecutor.Config())
    try:
        reports = executor.start(SumBlueprint(*size, **blueprint))
        executor.allocate(NUM_BLOCKS, HOST_BLOCKS)
        yield executor, [report.weights["pid"] for report in reports]
    finally:
        executor.close()


def run(executor: TorchDistributedExecutor, step: SumStep) -> list[int]:
    executor.submit(step)
    return executor.receive().token_ids


def test_no_rank_outlives_an_engine_that_is_killed():
    """Neither one that waits for another, nor one that computes, nor one that is stopped."""
    with subprocess.Popen([sys.executable, "-c", ENGINE], stdout=subprocess.PIPE, text=True) as run:
        try:
            pids = [int(pid) for pid in run.stdout.readline().split()]
            assert len(pids) == 2
            os.kill(pids[1], signal.SIGSTOP)
        finally:
            run.kill()
        run.wait()
    wait_until_gone(pids)


def test_a_rank_that_hangs_ends_by_itself_when_its_connection_does():
    """As it must where the kernel does not kill it."""
    rank = RankProcess(SumBlueprint().rank(0))
    store = socket.create_server(("127.0.0.1", 0))
    port = store.getsockname()[1]
    Launch([rank], os.environ, store).wait()
    try:
        text = SumBlueprint(trouble={"kind": "sleeps", "rank": 0}).dump()
        rank.send(pack(Start(text, 0, port, sys.path, {})))
        rank.connection.setblocking(True)
        while rank.doing != "loads the model":
            rank.send(pack(Ping()))
            for message in rank.read():
                rank.doing = message.doing
            time.sleep(0.1)
        rank.hang_up()
        assert rank.process.wait(PATIENCE) == 0
    finally:
        rank.bury(0)


def test_ranks_stay_when_the_thread_ends_that_started_them():
    made = {}

    def start() -> None:
        made["context"] = started(1)
        made["executor"], made["pids"] = made["context"].__enter__()

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    try:
        time.sleep(0.5)
        assert run(made["executor"], SumStep([1])) == SumStep([1]).expected(1, 1, 1)
    finally:
        made["executor"].close()
    wait_until_gone(made["pids"])


def test_an_executor_that_nobody_closes_takes_its_ranks_along():
    context = started(2)
    executor, pids = context.__enter__()
    del executor, context
    wait_until_gone(pids)


def test_signals_to_all_processes_of_a_service_are_for_the_engine_alone():
    with started(2) as (executor, pids):
        for pid in pids:
            os.kill(pid, signal.SIGINT)
            os.kill(pid, signal.SIGTERM)
        assert run(executor, SumStep([1])) == SumStep([1]).expected(1, 2, 1)


def test_ctrl_c_while_a_model_loads_leaves_nothing_behind():
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = children()
    executor = TorchDistributedExecutor(TorchDistributedExecutor.Config())
    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 2.0)
    try:
        with pytest.raises(KeyboardInterrupt):
            executor.start(SumBlueprint(2, trouble={"kind": "sleeps", "rank": 1}))
        assert len(children() - before) == 2
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        executor.close()
    assert children() - before == set()


def test_a_rank_that_is_killed_is_named_with_what_ended_it():
    with started(2, 2) as (executor, pids):
        run(executor, SumStep([1]))
        executor.submit(SumStep([1], trouble=Trouble("sleeps", 0)))
        os.kill(pids[2], signal.SIGKILL)
        with pytest.raises(WorkerError) as caught:
            executor.receive()
        assert str(caught.value) == (
            f"rank 2 (stage 1, tensor rank 0, pid {pids[2]}) was ended by SIGKILL"
        )


def test_the_log_tells_of_each_rank_what_went_wrong(caplog):
    with started(2) as (executor, _):
        executor.submit(SumStep([1], trouble=Trouble("raises", 1)))
        with pytest.raises(WorkerError, match="something is wrong here"):
            executor.receive()
    (record,) = [each for each in caplog.records if each.name == "pageloom_executors.rank"]
    assert record.levelno == logging.ERROR
    assert record.getMessage().startswith("rank 1: Traceback")


def test_of_ranks_that_hang_it_is_told_what_they_do():
    with started(2, timeout_seconds=1.5) as (executor, pids):
        executor.submit(SumStep([1], trouble=Trouble("sleeps", 0)))
        with pytest.raises(WorkerError) as caught:
            executor.receive()
        assert f"rank 0 (stage 0, tensor rank 0, pid {pids[0]}) computes" in str(caught.value)


def test_ranks_that_load_for_ever_are_told_of():
    executor = TorchDistributedExecutor(TorchDistributedExecutor.Config(load_seconds=5))
    try:
        with pytest.raises(WorkerError) as caught:
            executor.start(SumBlueprint(2, trouble={"kind": "sleeps", "rank": 1}))
    finally:
        executor.close()
    said = str(caught.value)
    assert "no rank has become ready for 5 seconds (parallel.options.load_seconds): " in said
    assert "rank 1 (" in said


def test_a_rank_that_hangs_before_it_has_its_cache_is_told_of():
    executor = TorchDistributedExecutor(TorchDistributedExecutor.Config())
    try:
        reports = executor.start(SumBlueprint(2))
        os.kill(reports[1].weights["pid"], signal.SIGSTOP)
        executor.config.load_seconds = 1
        with pytest.raises(WorkerError, match=r"ready for 1 seconds .*rank 1 .* does not react"):
            executor.allocate(NUM_BLOCKS, HOST_BLOCKS)
    finally:
        executor.close()


def test_a_step_that_not_all_ranks_have_is_the_last(monkeypatch):
    with started(2) as (executor, _):
        ask, asked = RankProcess.ask, []

        def interrupted(each: RankProcess, message: bytes) -> None:
            if asked:
                raise KeyboardInterrupt
            asked.append(each)
            ask(each, message)

        with monkeypatch.context() as patch:
            patch.setattr(RankProcess, "ask", interrupted)
            with pytest.raises(KeyboardInterrupt):
                executor.submit(SumStep([1]))
        with pytest.raises(WorkerError, match="not all ranks were sent the same"):
            executor.submit(SumStep([1]))


def test_a_step_that_was_interrupted_when_all_ranks_had_it_is_the_last(monkeypatch):
    """Its output would be taken for the next step's."""
    with started(2) as (executor, _):

        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Crew, "wait", interrupted)
            with pytest.raises(KeyboardInterrupt):
                executor.submit(SumStep([1]))
        with pytest.raises(WorkerError, match="not all ranks were sent the same"):
            executor.receive()


def test_an_interruption_while_steps_are_waited_for_loses_none():
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with started(1) as (executor, pids):
        os.kill(pids[0], signal.SIGSTOP)
        executor.submit(SumStep([1]))
        previous = signal.signal(signal.SIGALRM, interrupt)

        def receive() -> None:
            signal.setitimer(signal.ITIMER_REAL, 0.5)
            executor.receive()

        try:
            with pytest.raises(KeyboardInterrupt):
                receive()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)
        os.kill(pids[0], signal.SIGCONT)
        assert executor.receive().token_ids == SumStep([1]).expected(1, 1, 1)


def test_what_a_rank_has_printed_is_not_lost(tmp_path: Path):
    """As by a model's own code, to a log that is a file."""
    (tmp_path / "loud.py").write_text(LOUD)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONUNBUFFERED": ""}
    command = [sys.executable, "-c", "import loud; loud.main()"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "here is rank 0" in done.stderr


def test_a_rank_that_reads_nothing_keeps_nobody_waiting():
    with started(1, timeout_seconds=1.5) as (executor, pids):
        os.kill(pids[0], signal.SIGSTOP)
        with pytest.raises(WorkerError, match=r"read nothing for 1\.5 seconds.* does not react"):
            executor.submit(SumStep([1], padding="long" * 10_000_000))


def test_a_blueprint_that_cannot_be_made_again_is_an_error_in_one_line(monkeypatch):
    monkeypatch.setattr(SumBlueprint, "dump", lambda self: '{"class": "nowhere:At", "state": {}}')
    with pytest.raises(WorkerError, match="No module named 'nowhere'"), started(1):
        pytest.fail("it starts")


def test_modules_are_found_where_the_engine_finds_them(tmp_path: Path, monkeypatch):
    (tmp_path / "made_here.py").write_text(
        "from pageloom.testing.executor_model import SumBlueprint\nclass Mine(SumBlueprint): ..."
    )
    monkeypatch.syspath_prepend(tmp_path)
    import made_here

    executor = TorchDistributedExecutor(TorchDistributedExecutor.Config())
    try:
        (report,) = executor.start(made_here.Mine())
        assert report.num_blocks == NUM_BLOCKS
    finally:
        executor.close()
