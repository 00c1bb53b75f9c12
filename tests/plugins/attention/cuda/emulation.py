"""The backend ``cuda_paged`` with its kernels compiled for this CPU: see emulator/emulator.h."""

from __future__ import annotations

import ctypes
import itertools
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from pageloom.contract import native
from pageloom_attention.cuda_paged.backend import CUDAPaged
from pageloom_attention.cuda_paged.instance import KERNELS, Instance

EMULATOR = Path(__file__).with_name("emulator")
PARAMS = {"store": "StoreParams", "copy": "CopyParams"}
# With little optimization: most of the time goes into compiling.
FLAGS = ("-std=c++17", "-Og", "-march=native", "-fPIC", "-w")


class EmulationError(RuntimeError):
    """A kernel did what a GPU forbids; the message says what, and where."""


class EmulatedKernels:
    """The kernels of one instance, run on the CPU when they are launched."""

    seeds = itertools.count(1)  # every launch has its own order of warps

    def __init__(self, instance: Instance) -> None:
        self.library = built(tuple(instance.kernels.items()))

    def launch(self, part, grid, threads, params):
        function = getattr(self.library, f"launch_{part}")
        function.restype = ctypes.c_char_p
        size = getattr(self.library, f"size_{part}")()
        assert size == ctypes.sizeof(params), f"{type(params).__name__} differs from C++'s"
        error = function(*grid, threads, next(self.seeds), ctypes.byref(params))
        if error:
            raise EmulationError(f"{part}: {error.decode()}")


class EmulatedCUDAPaged(CUDAPaged):
    """On the CPU, as a GPU that is worth splitting even short contexts for."""

    min_split_tokens = 48

    @classmethod
    def check(cls, spec):
        return cls.check_shapes(spec)

    def load(self, instance):
        return EmulatedKernels(instance)

    def multiprocessors(self):
        return 8


def source_of(kernels: Mapping[str, str]) -> str:
    """C++ with a function for each part, which runs its kernel and returns what went wrong."""
    lines = ["#include <device.cuh>", "#include <kernels.cu>"]
    for part, name in kernels.items():
        params = PARAMS.get(name.partition("<")[0], "AttentionParams")
        lines.append(
            f'extern "C" const char* launch_{part}(unsigned x, unsigned y, unsigned z, unsigned '
            f"threads, unsigned seed, const {params}* p) {{ return emulator::launch({{x, y, z}}, "
            f"threads, seed, [p] {{ {name}(*p); }}); }}\n"
            f'extern "C" int size_{part}() {{ return sizeof({params}); }}'
        )
    return "\n".join(lines)


@cache
def built(kernels: tuple[tuple[str, str], ...]) -> ctypes.CDLL:
    return compiled(source_of(dict(kernels)))


def compiled(source: str) -> ctypes.CDLL:
    """Compile C++ that begins with ``#include <device.cuh>``, the emulator's, and load it."""
    with tempfile.TemporaryDirectory() as folder:
        file, library = Path(folder, "kernels.cpp"), Path(folder, "kernels.so")
        file.write_text(source)
        # The emulator's device.cuh comes before that of the kernels.
        run("-shared", f"-I{precompiled().name}", f"-I{KERNELS}", "-x", "c++", file, "-o", library)
        return ctypes.CDLL(str(library))


@cache
def precompiled() -> tempfile.TemporaryDirectory:
    """A folder with the emulator's headers, which the compiler need not read again each time."""
    folder = tempfile.TemporaryDirectory()
    for header in EMULATOR.iterdir():
        shutil.copy(header, folder.name)
    header = Path(folder.name, "device.cuh")
    run("-x", "c++-header", header, "-o", header.with_suffix(".cuh.gch"))
    return folder


def run(*arguments: str | Path) -> None:
    command = [*native.find_compiler(), *FLAGS, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{shlex.join(command)} failed:\n{done.stderr}"
