"""Running compiled kernels on an NVIDIA GPU."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from pageloom_attention.cuda_paged.cubins import cached_kernels
from pageloom_attention.cuda_paged.instance import Instance


class DriverError(RuntimeError):
    """The CUDA driver refused what it was asked; the message holds its answer."""


class DriverKernels:
    """The kernels of one instance on one GPU; they run on torch's current stream there."""

    def __init__(self, instance: Instance, device: torch.device) -> None:
        from cuda.bindings import driver

        self._driver, self._device = driver, device
        names = instance.kernels
        major, minor = torch.cuda.get_device_capability(device)
        compiled = cached_kernels(names.values(), f"sm_{major}{minor}")
        with torch.cuda.device(device):  # makes torch's context the current one
            torch.cuda.current_stream().synchronize()
            # The library is not unloaded: CUDA graphs that were captured may outlive this object.
            library = _checked(
                driver.cuLibraryLoadData(compiled.cubin, None, None, 0, None, None, 0)
            )
            self._kernels = {
                part: _checked(driver.cuLibraryGetKernel(library, compiled.symbols[name]))
                for part, name in names.items()
            }

    def launch(
        self, part: str, grid: tuple[int, int, int], threads: int, params: ctypes.Structure
    ) -> None:
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        with torch.cuda.device(self._device):
            _checked(
                self._driver.cuLaunchKernel(
                    self._driver.CUfunction(int(self._kernels[part])),
                    *grid,
                    *(threads, 1, 1),
                    0,
                    torch.cuda.current_stream().cuda_stream,
                    ctypes.addressof(pointers),
                    0,
                )
            )


def _checked(answer: tuple[Any, ...]) -> Any:
    status, *values = answer
    if status:
        raise DriverError(f"the CUDA driver failed: {status.name}")
    return values[0] if values else None
