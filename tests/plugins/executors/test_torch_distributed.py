"""What `torch_distributed` can run, and how its ranks are set up."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from pageloom.testing.executor_model import SumBlueprint
from pageloom_executors import torch_distributed
from pageloom_executors.torch_distributed import TorchDistributedExecutor, _environment

check = TorchDistributedExecutor.check
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_every_rank_needs_a_gpu_of_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda name: name == "nccl")
    assert check(SumBlueprint(2, 2, device="cuda")) is None
    assert check(SumBlueprint(2, 1, device="cuda:2")) is None
    assert check(SumBlueprint(2, 2, device="cuda:1")) == (
        "needs a GPU for each rank, up to cuda:4, but there are 4"
    )


def test_what_it_cannot_run_is_refused_with_a_reason(monkeypatch):
    assert check(SumBlueprint(2)) is None
    assert check(SumBlueprint(2, device="mps")) == "runs ranks on cpu or cuda devices, not on mps"
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda name: False)
    assert check(SumBlueprint(2)) == f"needs gloo, which torch {torch.__version__} comes without"


def test_ranks_share_the_cores_unless_it_is_said_how_many_threads_they_have(monkeypatch):
    blueprint = SumBlueprint(2)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch_distributed, "_num_cores", lambda: 8)
    assert _environment(blueprint)["OMP_NUM_THREADS"] == "1"  # as it says
    blueprint.num_threads = None
    assert _environment(blueprint)["OMP_NUM_THREADS"] == "4"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert _environment(blueprint)["OMP_NUM_THREADS"] == "3"


def test_as_many_steps_are_under_way_as_there_are_stages():
    executor = TorchDistributedExecutor(TorchDistributedExecutor.Config())
    try:
        executor.start(SumBlueprint(1, 2))
        assert executor.max_in_flight == 2
    finally:
        executor.close()


@on_linux
def test_ranks_listen_on_the_loopback_interface_alone():
    executor = TorchDistributedExecutor(TorchDistributedExecutor.Config())
    try:
        reports = executor.start(SumBlueprint(2))
        found = {
            address
            for report in reports
            for address in listening_addresses(Path(f"/proc/{report.weights['pid']}"))
        }
    finally:
        executor.close()
    assert found == {"0100007F"}  # 127.0.0.1


def listening_addresses(process: Path) -> list[str]:
    """The TCP addresses, in hexadecimal, that a process listens on."""
    sockets = set()
    for entry in (process / "fd").iterdir():
        target = os.readlink(entry)
        if target.startswith("socket:["):
            sockets.add(target[8:-1])
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in (process / "net" / table).read_text().splitlines()[1:]
    ]
    return [
        local.partition(":")[0]
        for _, local, _, state, _, _, _, _, _, inode, *_ in lines
        if state == "0A" and inode in sockets
    ]
