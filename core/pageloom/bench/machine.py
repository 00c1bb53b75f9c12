"""What a measurement ran on."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

import pageloom
from pageloom.errors import counted


@dataclass(frozen=True)
class Machine:
    cpu: str
    cores: int  # that this process may use
    threads: int  # of torch
    gpu: str | None
    system: str
    python: str
    torch: str
    pageloom: str
    load_average: tuple[float, float] | None
    """At the start and the end: processes that could run, over a minute. Where it is far above
    `threads`, others competed for the machine."""

    @classmethod
    def describe(cls, load_at_start: float | None) -> Machine:
        """This machine, at the end of a run."""
        load = load_average()
        return cls(
            cpu=_cpu_model(),
            cores=len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count() or 1,
            threads=torch.get_num_threads(),
            gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            system=platform.platform(),
            python=platform.python_version(),
            torch=torch.__version__,
            pageloom=pageloom.__version__,
            load_average=None if load_at_start is None or load is None else (load_at_start, load),
        )

    def __str__(self) -> str:
        parts = [
            self.cpu,
            f"{counted(self.cores, 'core')}, {counted(self.threads, 'thread')}",
            self.gpu or "no GPU",
            f"torch {self.torch}",
        ]
        if self.load_average is not None:
            start, end = self.load_average
            parts.append(f"load average {start:.1f} at the start, {end:.1f} at the end")
        return "; ".join(parts)


def load_average() -> float | None:
    """Of the last minute; None where the system does not tell."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
