"""The executors of this package that run here pass the suite for authors of executors."""

from __future__ import annotations

from pageloom.testing import ExecutorSuite
from pageloom_executors.local import LocalExecutor
from pageloom_executors.torch_distributed import TorchDistributedExecutor


class TestLocal(ExecutorSuite):
    sizes = [(1, 1)]
    too_large = (2, 1)

    def executor(self):
        return LocalExecutor(LocalExecutor.Config())


class TestTorchDistributed(ExecutorSuite):
    def executor(self):
        return TorchDistributedExecutor(TorchDistributedExecutor.Config())
