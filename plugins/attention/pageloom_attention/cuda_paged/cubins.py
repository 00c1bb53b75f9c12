"""Compiled kernels, kept between processes: NVRTC takes seconds for each instance."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from pageloom.contract import native
from pageloom_attention.cuda_paged import nvrtc
from pageloom_attention.cuda_paged.nvrtc import Compiled

log = logging.getLogger(__name__)


def cached_kernels(names: Iterable[str], arch: str) -> Compiled:
    """`nvrtc.compile_kernels`, unless that was done before.

    What it returned is kept in `native.cache_folder` under a key of the sources, the names, the
    options, ``arch`` and NVRTC's version. A damaged file is written anew; where none can be
    written, every process compiles.
    """
    wanted = list(dict.fromkeys(names))
    file = native.cache_folder() / f"cuda_paged-{_key(wanted, arch)}.cubin"
    if found := _read(file):
        return found
    compiled = nvrtc.compile_kernels(wanted, arch)
    try:
        _write(file, compiled)
    except OSError as error:
        log.warning("compiled CUDA kernels cannot be kept in %s: %s", file.parent, error)
    return compiled


def _key(names: list[str], arch: str) -> str:
    files = nvrtc.sources().items()
    parts = [nvrtc.version(), arch, *nvrtc.OPTIONS, *names]
    parts += [f"{name} {hashlib.sha256(text).hexdigest()}" for name, text in files]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


# A file is the digest of all that follows, a line of JSON, and the machine code.


def _write(file: Path, compiled: Compiled) -> None:
    symbols = {name: symbol.decode() for name, symbol in compiled.symbols.items()}
    header = json.dumps({"symbols": symbols, "log": compiled.log}).encode()
    content = header + b"\n" + compiled.cubin
    file.parent.mkdir(parents=True, exist_ok=True)
    # Whole or not at all: several processes may do this at the same time.
    descriptor, name = tempfile.mkstemp(dir=file.parent, suffix=".partial")
    try:
        with os.fdopen(descriptor, "wb") as partial:
            partial.write(hashlib.sha256(content).digest() + content)
        Path(name).replace(file)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise


def _read(file: Path) -> Compiled | None:
    """What `_write` wrote, None if there is no such file or it is damaged."""
    try:
        data = file.read_bytes()
    except OSError:
        return None
    size = hashlib.sha256().digest_size
    digest, content = data[:size], data[size:]
    if hashlib.sha256(content).digest() != digest:
        return None
    header, _, cubin = content.partition(b"\n")
    values = json.loads(header)
    symbols = {name: symbol.encode() for name, symbol in values["symbols"].items()}
    return Compiled(cubin, symbols, values["log"])
