"""Compiling the kernels with NVRTC, which needs neither a GPU nor a driver."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pageloom_attention.cuda_paged.instance import KERNELS, SOURCE

OPTIONS = ("--std=c++17", "--ptxas-options=-v")


class CompileError(RuntimeError):
    """NVRTC is missing, or refused the source; the message holds what it said."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """Machine code for one architecture."""

    cubin: bytes
    symbols: Mapping[str, bytes]  # of each C++ name that was asked for
    log: str  # what the compiler and ptxas said

    @property
    def spilled_bytes(self) -> int:
        """Bytes of registers that some kernel keeps in memory for lack of room."""
        return sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", self.log)))


def missing() -> str | None:
    """What keeps NVRTC from being used here, None if nothing does."""
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except ImportError as error:
        return f"cuda-bindings ({error})"
    except RuntimeError as error:
        return f"the NVRTC library ({str(error).splitlines()[0]})"
    return None


def version() -> str:
    """Of NVRTC, such as ``13.0``."""
    from cuda.bindings import nvrtc

    major, minor = _checked(nvrtc.nvrtcVersion())
    return f"{major}.{minor}"


def sources() -> dict[str, bytes]:
    """The kernels' files by name, `SOURCE` first."""
    return {file.name: file.read_bytes() for file in (SOURCE, *sorted(KERNELS.glob("*.cuh")))}


def compile_kernels(names: Iterable[str], arch: str) -> Compiled:
    """Compile the template instances ``names`` for ``arch``, such as ``sm_90``."""
    from cuda.bindings import nvrtc

    (main, source), *headers = sources().items()
    program = _checked(
        nvrtc.nvrtcCreateProgram(
            source,
            main.encode(),
            len(headers),
            [text for _, text in headers],
            [header.encode() for header, _ in headers],
        )
    )
    try:
        wanted = {name: name.encode() for name in names}
        for name in wanted.values():
            _checked(nvrtc.nvrtcAddNameExpression(program, name))
        options = [option.encode() for option in (f"--gpu-architecture={arch}", *OPTIONS)]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        log = bytearray(_checked(nvrtc.nvrtcGetProgramLogSize(program)))
        _checked(nvrtc.nvrtcGetProgramLog(program, log))
        text = log.rstrip(b"\0").decode()
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(f"NVRTC failed for {arch} ({status.name}):\n{text}")
        cubin = bytearray(_checked(nvrtc.nvrtcGetCUBINSize(program)))
        _checked(nvrtc.nvrtcGetCUBIN(program, cubin))
        symbols = {
            name: _checked(nvrtc.nvrtcGetLoweredName(program, encoded))
            for name, encoded in wanted.items()
        }
        return Compiled(bytes(cubin), symbols, text)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _checked(answer: tuple[Any, ...]) -> Any:
    """The value in what a function of ``cuda.bindings`` returned."""
    status, *values = answer
    if status:
        raise CompileError(f"NVRTC failed: {status.name}")
    return None if not values else values[0] if len(values) == 1 else tuple(values)
