"""The executor `ray`, on a cluster of one machine."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from network_hosts import wait_until

from pageloom.contract import WorkerError
from pageloom.testing import ExecutorSuite
from pageloom.testing.executor_model import HOST_BLOCKS, NUM_BLOCKS, SumBlueprint, SumStep
from pageloom_executors.ray_executor import RayExecutor, Strategy
from pageloom_executors.ray_rank import interface_of

ray = pytest.importorskip("ray")


@pytest.fixture(scope="module", autouse=True)
def _folder() -> Iterator[None]:
    """Where Ray keeps its files, among them the address of a cluster that others may join."""
    with TemporaryDirectory(prefix="ray") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("RAY_AUTH_MODE", "disabled")  # or it writes a token into the home folder
        patch.setenv("RAY_memory_monitor_refresh_ms", "0")  # or others' memory ends its workers
        patch.delenv("RAY_ADDRESS", raising=False)
        yield


@pytest.fixture(scope="class")
def _cluster() -> Iterator[None]:
    ray.init(
        address="local",
        num_cpus=4,
        object_store_memory=1 << 28,
        include_dashboard=False,
        logging_level=logging.WARNING,
    )
    yield
    ray.shutdown()


@pytest.mark.usefixtures("_cluster")
class TestRay(ExecutorSuite):
    sizes = [(2, 1), (2, 2)]

    def executor(self):
        return RayExecutor(RayExecutor.Config())

    def test_gives_its_place_back_and_stays_in_a_cluster_that_is_not_its_own(self):
        with self.running(2, 1) as running:
            running.check(SumStep([1]))
            _wait_until_free(2.0)
        _wait_until_free(4.0)
        assert ray.is_initialized()

    def test_says_what_a_machine_lacks(self, monkeypatch):
        monkeypatch.setattr(
            SumBlueprint, "dump", lambda self: '{"class": "no_such_package:Blueprint", "state": {}}'
        )
        executor = self.executor()
        try:
            with pytest.raises(WorkerError, match=r"rank 0 .* No module named 'no_such_package'"):
                executor.start(SumBlueprint(1, 1))
        finally:
            executor.close()

    def test_a_rank_that_hangs_before_it_has_its_cache_is_told_of(self):
        executor = self.executor()
        try:
            reports = executor.start(SumBlueprint(2, 1))
            os.kill(reports[1].weights["pid"], signal.SIGSTOP)
            executor.config.load_seconds = 1
            with pytest.raises(
                WorkerError,
                match=r"ready for 1 seconds \(parallel\.options\.load_seconds\): .*rank 1 .* hangs",
            ):
                executor.allocate(NUM_BLOCKS, HOST_BLOCKS)
        finally:
            executor.close()
        _wait_until_free(4.0)

    def test_an_interruption_while_steps_are_waited_for_loses_none(self, monkeypatch):
        def interrupted(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        with self.running(2, 1) as running:
            running.executor.submit(SumStep([1]))
            with monkeypatch.context() as patch:
                patch.setattr(ray, "wait", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    running.executor.receive()
            assert running.executor.receive().token_ids == SumStep([1]).expected(1, 2, 1)

    def test_a_step_that_not_all_ranks_have_is_the_last(self, monkeypatch):
        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        with self.running(2, 1) as running:
            with monkeypatch.context() as patch:
                patch.setattr(ray, "put", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    running.executor.submit(SumStep([1], padding="long" * 100_000))
            with pytest.raises(WorkerError, match="not all ranks were sent the same"):
                running.executor.submit(SumStep([1]))

    def test_says_what_there_is_no_room_for(self):
        executor = RayExecutor(
            RayExecutor.Config(num_cpus=3, strategy=Strategy.STRICT_PACK, placement_seconds=1)
        )
        try:
            with pytest.raises(
                WorkerError,
                match=r"no room for 2 ranks with 3 CPU each: 4 CPU are free on 1 machines, after 1",
            ):
                executor.start(SumBlueprint(2, 1))
        finally:
            executor.close()
        _wait_until_free(4.0)


def _wait_until_free(cores: float) -> None:
    wait_until(lambda: ray.available_resources().get("CPU") == cores)


def test_a_cluster_of_its_own_ends_with_it():
    executor = RayExecutor(RayExecutor.Config(address="local", num_cpus=0.5))
    try:
        executor.start(SumBlueprint(1, 1))
        assert ray.is_initialized()
    finally:
        executor.close()
    assert not ray.is_initialized()


def refusal(address: str) -> str:
    """What is said of a cluster that cannot be joined."""
    executor = RayExecutor(RayExecutor.Config(address=address))
    try:
        with pytest.raises(WorkerError) as caught:
            executor.start(SumBlueprint(1, 1))
    finally:
        executor.close()
    return str(caught.value)


def test_without_a_cluster_it_says_how_to_start_one(monkeypatch):
    from ray._private import services

    monkeypatch.setattr(services, "find_gcs_addresses", set)  # there may be one of other tests
    assert re.search(r"address auto: .*; start one by 'ray start --head'", refusal("auto"))


@pytest.mark.parametrize("given_by", ["parallel.options.address", "RAY_ADDRESS"])
def test_an_address_where_nobody_listens_is_told_of_at_once(given_by, monkeypatch):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        if given_by == "RAY_ADDRESS":
            monkeypatch.setenv("RAY_ADDRESS", address)
            address = "auto"
        said = refusal(address)
    assert re.match(
        rf"no Ray cluster at {given_by} 127\.0\.0\.1:\d+: [\d.]+:\d+ takes no connection "
        r"\(Connection refused\); start one by 'ray start --head'",
        said,
    )


def test_the_address_of_another_service_of_ray_is_refused(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:8265")
    assert re.search(r"RAY_ADDRESS http:.* must be auto, local or HOST:PORT", refusal("auto"))


def test_signals_stay_with_whoever_owns_the_process(monkeypatch):
    """Though Ray takes SIGTERM before it finds that it cannot start."""

    def init(**_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise ConnectionError("it cannot")

    monkeypatch.setattr(ray, "init", init)
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert "it cannot" in refusal("local")
        assert signal.getsignal(signal.SIGTERM) is before
    finally:
        signal.signal(signal.SIGTERM, before)


def test_without_ray_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert RayExecutor.check(SumBlueprint(1, 1)) == (
        "needs the package ray: pip install 'pageloom[ray]'"
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"address": "ray://there:10001"}, "address must be auto, local or HOST:PORT"),
        ({"num_cpus": 0}, "must be above 0"),
        ({"num_gpus": 2}, "num_gpus must be above 0 and at most 1"),
        ({"load_seconds": 0}, "load_seconds must be above 0"),
    ],
)
def test_options_that_cannot_be(options, said):
    with pytest.raises(ValueError, match=said):
        RayExecutor.Config(**options)


def test_the_interface_of_an_address():
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.77") is None


def test_a_cluster_of_its_own_ends_when_the_engine_is_killed():
    source = (
        "import os, signal, subprocess\n"
        "from pageloom.testing.executor_model import SumBlueprint\n"
        "from pageloom_executors.ray_executor import RayExecutor\n"
        "executor = RayExecutor(RayExecutor.Config(address='local', num_cpus=0.5))\n"
        "(report,) = executor.start(SumBlueprint(1, 1))\n"
        "print(report.weights['pid'])\n"
        "print(subprocess.run(['pgrep', '-P', str(os.getpid())], capture_output=True,"
        " text=True).stdout, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
    assert done.returncode == -signal.SIGKILL
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) >= 3  # the rank, and Ray's own processes
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
