"""Compiled kernels are kept between processes."""

from __future__ import annotations

import pytest

from pageloom_attention.cuda_paged import nvrtc
from pageloom_attention.cuda_paged.cubins import cached_kernels

pytestmark = pytest.mark.skipif(
    (reason := nvrtc.missing()) is not None, reason=f"needs {reason}: pip install 'pageloom[cuda]'"
)

NAMES = ["copy<uint4>"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "pageloom"


@pytest.fixture
def compilations(monkeypatch):
    """What was really compiled."""
    asked = []
    compile_kernels = nvrtc.compile_kernels

    def counted(names, arch):
        asked.append((list(names), arch))
        return compile_kernels(names, arch)

    monkeypatch.setattr(nvrtc, "compile_kernels", counted)
    return asked


def test_what_was_compiled_once_is_not_compiled_again(folder, compilations):
    first = cached_kernels(NAMES, "sm_90")
    assert cached_kernels(NAMES, "sm_90") == first
    assert first.cubin.startswith(b"\x7fELF")
    assert first.symbols[NAMES[0]] in first.cubin
    assert len(compilations) == len(list(folder.iterdir())) == 1


@pytest.mark.parametrize("what", ["names", "arch", "source", "options", "version"])
def test_another_request_is_compiled(folder, compilations, monkeypatch, what):
    cached_kernels(NAMES, "sm_90")
    if what == "source":
        changed = nvrtc.sources() | {"cache.cuh": nvrtc.sources()["cache.cuh"] + b"\n"}
        monkeypatch.setattr(nvrtc, "sources", lambda: changed)
    elif what == "options":
        monkeypatch.setattr(nvrtc, "OPTIONS", (*nvrtc.OPTIONS, "--use_fast_math"))
    elif what == "version":
        monkeypatch.setattr(nvrtc, "version", lambda: "99.9")
    names = ["copy<uint2>"] if what == "names" else NAMES
    cached_kernels(names, "sm_80" if what == "arch" else "sm_90")
    assert len(compilations) == len(list(folder.iterdir())) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: b"",
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        lambda data: data[:40] + b"x" + data[41:],
    ],
    ids=["cut short", "empty", "another bit", "another header"],
)
def test_a_damaged_file_is_written_anew(folder, compilations, damage):
    first = cached_kernels(NAMES, "sm_90")
    (file,) = folder.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    again = cached_kernels(NAMES, "sm_90")
    assert (again.cubin, again.symbols) == (first.cubin, first.symbols)
    assert cached_kernels(NAMES, "sm_90") == again
    assert len(compilations) == 2


def test_without_a_folder_kernels_are_compiled_all_the_same(
    tmp_path, monkeypatch, compilations, caplog
):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for _ in range(2):
        assert cached_kernels(NAMES, "sm_90").cubin.startswith(b"\x7fELF")
    assert len(compilations) == 2
    assert "cannot be kept in" in caplog.text
