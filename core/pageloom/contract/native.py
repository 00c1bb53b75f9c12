"""Native code in a plugin: C++ source in, loaded library out.

A plugin ships a ``.cpp`` file whose functions are ``extern "C"``, with the headers that it includes
beside it, and calls them by ctypes, which costs about a microsecond::

    from pageloom.contract import native

    library = native.build(Path(__file__).with_name("kernel.cpp"))
    library.my_kernel(tensor.data_ptr(), len(tensor))

The source is compiled for this machine's CPU when it is first needed, and kept under a key of
source, headers, compiler and CPU features, so that later starts only load it. OpenMP pragmas work;
they run on the threads of torch, which must be imported before, so ``torch.set_num_threads``
counts.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fopenmp")
THIS_CPU = "-march=native"  # which some compilers lack for some CPUs


class NativeBuildError(RuntimeError):
    """The source could not be compiled or loaded; the message holds what the compiler said."""


def find_compiler() -> list[str] | None:
    """The command of the C++ compiler: ``$CXX``, or the first of g++, c++ and clang++ there is.

    On Linux torch brings the OpenMP runtime of g++, so that comes first.
    """
    if named := shlex.split(os.environ.get("CXX", "")):
        return named if shutil.which(named[0]) else None
    found = next((path for name in ("g++", "c++", "clang++") if (path := shutil.which(name))), None)
    return [found] if found else None


def build(source: Path, flags: Sequence[str] = ()) -> ctypes.CDLL:
    """Compile ``source`` with `FLAGS` and ``flags``, unless that was done before, and load it.

    The files in its folder whose names end with ``.h`` count as parts of it.
    Libraries are kept in `cache_folder`; several processes may build at the same time. Raises
    `NativeBuildError` if there is no compiler, if it fails, or if the library cannot be kept or
    loaded.
    """
    compiler = find_compiler()
    if compiler is None:
        raise NativeBuildError("there is no C++ compiler: install one (c++), or set CXX")
    command = [*compiler, *FLAGS, THIS_CPU, *flags]
    try:
        macros = _macros(command)
    except NativeBuildError:
        command.remove(THIS_CPU)
        macros = _macros(command)
    files = [source, *sorted(source.parent.glob("*.h"))]
    parts = [*command, macros, *(file.read_text("utf-8") for file in files)]
    key = hashlib.sha256("\0".join(parts).encode())
    library = cache_folder() / f"{source.stem}-{key.hexdigest()[:32]}.so"
    try:
        if not library.exists():
            _compile(command, source, library)
    except OSError as error:
        raise NativeBuildError(
            "set XDG_CACHE_HOME to a folder that can be written to: "
            f"{library.parent} cannot hold what is compiled ({error.strerror})"
        ) from error
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise NativeBuildError(
            f"{source.name} was compiled but cannot be loaded: {error}"
        ) from error


def _macros(command: Sequence[str]) -> str:
    """What the compiler defines itself, which tells its version and the features of the CPU."""
    return _run([*command, "-x", "c++", "-dM", "-E", os.devnull])


def _compile(command: Sequence[str], source: Path, library: Path) -> None:
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        compiled, linked = Path(folder, "kernel.o"), Path(folder, "kernel.so")
        _run([*command, "-c", str(source), "-o", str(compiled)])
        # Linked without an OpenMP runtime of its own: the symbols are those that torch has loaded.
        linking = [argument for argument in command if argument != "-fopenmp"]
        undefined = ["-undefined", "dynamic_lookup"] if os.uname().sysname == "Darwin" else []
        _run([*linking, "-shared", *undefined, str(compiled), "-o", str(linked)])
        linked.replace(library)


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise NativeBuildError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        raise NativeBuildError(f"{shlex.join(command)} failed:\n{done.stderr.strip()}")
    return done.stdout


def cache_folder() -> Path:
    """Where what was compiled is kept: ``$XDG_CACHE_HOME/pageloom`` (``~/.cache/pageloom``). It may
    not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base, "pageloom")
