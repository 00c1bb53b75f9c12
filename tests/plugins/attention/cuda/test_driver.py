"""Loading and launching, against a CUDA driver that only says what it was asked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pageloom.contract import native
from pageloom_attention.cuda_paged import nvrtc

DRIVER = Path(__file__).with_name("libcuda.cpp")
pytestmark = [
    pytest.mark.skipif(native.find_compiler() is None, reason="there is no C++ compiler"),
    pytest.mark.skipif(
        (reason := nvrtc.missing()) is not None, reason=f"needs {reason}: pageloom[cuda]"
    ),
]

SCRIPT = """
import contextlib, types, torch
from pageloom_attention.cuda_paged.driver import DriverError, DriverKernels
from pageloom_attention.cuda_paged.instance import Instance
from pageloom_attention.cuda_paged.params import CopyParams

stream = types.SimpleNamespace(cuda_stream=77, synchronize=lambda: None)
torch.cuda.get_device_capability = lambda device: (9, 0)
torch.cuda.current_stream = lambda: stream
torch.cuda.device = lambda device: contextlib.nullcontext()

kernels = DriverKernels(Instance(torch.float32, 64, 2, 16), torch.device("cuda"))
kernels.launch("copy", (3, 2, 1), 128, CopyParams(111, 222, 333))
try:
    kernels.launch("copy", (1001, 2, 1), 128, CopyParams(111, 222, 333))
except DriverError as error:
    print(error)
"""


def test_kernels_are_loaded_and_launched_on_the_current_stream(tmp_path):
    library = tmp_path / "libcuda.so.1"
    subprocess.run([*native.find_compiler(), "-shared", "-fPIC", DRIVER, "-o", library], check=True)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    load, launch, refusal = done.stdout.splitlines()
    assert load == "load ELF"
    expected = "3 2 1 threads 128 shared 0 stream 77 params 111 333 extra 0"
    assert launch == f"launch _Z4copyI5uint4Ev10CopyParams {expected}"
    assert refusal == "the CUDA driver failed: CUDA_ERROR_INVALID_VALUE"
