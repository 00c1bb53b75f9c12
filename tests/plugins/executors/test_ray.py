"""The executor `ray`, on a cluster of one machine."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from network_hosts import wait_until

from pageloom.contract import WorkerError
from pageloom.testing import ExecutorSuite
from pageloom.testing.executor_model import SumBlueprint, SumStep
from pageloom_executors.ray_executor import RayExecutor, Strategy
from pageloom_executors.ray_rank import interface_of

ray = pytest.importorskip("ray")


@pytest.fixture(scope="module", autouse=True)
def _folder() -> Iterator[None]:
    """Where Ray keeps its files, among them the address of a cluster that others may join."""
    with TemporaryDirectory(prefix="ray") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("RAY_AUTH_MODE", "disabled")  # or it writes a token into the home folder
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


def test_without_a_cluster_it_says_how_to_start_one():
    executor = RayExecutor(RayExecutor.Config())
    with pytest.raises(WorkerError, match=r"address auto: .*; start one by 'ray start --head'"):
        executor.start(SumBlueprint(1, 1))
    executor.close()


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
        ({"num_gpus": 2}, "num_gpus above 0 and at most 1"),
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
