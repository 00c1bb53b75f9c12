"""The builder of native code."""

from __future__ import annotations

import ctypes
import shlex
import subprocess
import sys

import pytest

from pageloom.contract import native

needs_compiler = pytest.mark.skipif(
    native.find_compiler() is None, reason="there is no C++ compiler"
)
SUM = """
extern "C" double sum(const double* x, long n) {
  double total = 0;
#pragma omp parallel for reduction(+ : total)
  for (long i = 0; i < n; ++i) total += x[i];
  return total;
}
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "pageloom"


def write(folder, text, name="kernel.cpp"):
    source = folder / name
    source.write_text(text)
    return source


@needs_compiler
def test_a_library_is_built_once_and_loaded_again(tmp_path, cache, monkeypatch):
    import torch  # noqa: F401 (the OpenMP runtime)

    source = write(tmp_path, SUM)
    library = native.build(source)
    library.sum.restype = ctypes.c_double
    numbers = (ctypes.c_double * 1000)(*range(1000))
    assert library.sum(numbers, 1000) == 499500
    (built,) = cache.iterdir()
    written = built.stat().st_mtime_ns
    native.build(source)
    assert [path.stat().st_mtime_ns for path in cache.iterdir()] == [written]
    native.build(source, ["-DOTHER"])
    write(tmp_path, SUM + "\n")
    native.build(source)
    assert len(list(cache.iterdir())) == 3


@needs_compiler
def test_a_changed_header_means_another_library(tmp_path, cache):
    source = write(tmp_path, '#include "one.h"\nextern "C" int answer() { return ONE; }')
    write(tmp_path, "#define ONE 1", "one.h")
    assert native.build(source).answer() == 1
    write(tmp_path, "#define ONE 2", "one.h")
    assert native.build(source).answer() == 2


@needs_compiler
def test_a_compiler_may_not_know_this_cpu(tmp_path, cache, monkeypatch):
    """GCC for RISC-V, for one, knows no -march=native."""
    compiler = tmp_path / "compiler"
    real = shlex.join(native.find_compiler())
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *native*) exit 1;; esac\nexec {real} "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert native.build(write(tmp_path, 'extern "C" int answer() { return 42; }')).answer() == 42


@needs_compiler
def test_what_the_compiler_says_reaches_the_user(tmp_path, cache):
    with pytest.raises(native.NativeBuildError, match=r"kernel\.cpp.*(?s:.*)error: "):
        native.build(write(tmp_path, "int f() { return nothing; }"))
    assert not list(cache.glob("*"))


@needs_compiler
def test_a_library_that_cannot_be_loaded_says_why(tmp_path, cache):
    source = write(tmp_path, 'extern "C" int missing(); extern "C" int f() { return missing(); }')
    with pytest.raises(native.NativeBuildError, match=r"cannot be loaded: .*missing"):
        native.build(source, ["-Wl,-z,now"])


@needs_compiler
def test_a_cache_that_cannot_be_written_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(write(tmp_path, "", "a file")))
    with pytest.raises(native.NativeBuildError, match=r"set XDG_CACHE_HOME to .*: .*a file"):
        native.build(write(tmp_path, SUM))


def test_without_a_compiler_the_message_says_what_to_do(tmp_path, cache, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert native.find_compiler() is None
    with pytest.raises(native.NativeBuildError, match="install one"):
        native.build(write(tmp_path, SUM))


@needs_compiler
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_there_is_one_openmp_runtime():
    """A second one would double the threads and spin against the first."""
    script = """
import torch
from pageloom.contract import native
from pageloom_attention.cpu_paged import FLAGS, SOURCE
native.build(SOURCE, FLAGS)
names = {line.split()[-1] for line in open("/proc/self/maps") if "omp" in line.rsplit("/")[-1]}
print(*names)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    (runtime,) = done.stdout.split()
    assert "torch" in runtime
