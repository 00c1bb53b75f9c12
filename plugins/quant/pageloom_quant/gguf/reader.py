"""The header of a GGUF file: its metadata, and where each tensor lies.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. `gguf.GGUFReader` wraps every
element of every array in numpy objects, which takes seconds for a vocabulary, and answers damaged
files with an IndexError. This reads the same header in one pass and checks every length first;
the constants and block formats still come from `gguf`.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32  # bytes
MAX_DIMS = 4
MAX_ITEMS = 1 << 24
"""Of a list: far more than any vocabulary has, and few enough to be held as Python objects."""
FLOAT32 = torch.finfo(torch.float32)
SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.FLOAT64: "d",
    GGUFValueType.BOOL: "?",
}

T = TypeVar("T")


class GGUFError(ValueError):
    """A file that cannot be loaded. The message starts with its path."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor, as its header describes it."""

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]  # elements, rows first (the reverse of how the file lists them)
    offset: int  # bytes from the start of the file
    size: int  # bytes

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])


class GGUFFile:
    """An open GGUF file. ``metadata`` maps each key to an int, float, bool, str or list of these;
    ``tensors`` maps each name to its `TensorInfo`.

    Raises `OSError` when the file cannot be read, and `GGUFError`, a `ValueError` that names the
    file, and the key or tensor where there is one, when it is not a GGUF file of version 2 or 3,
    is big-endian, is cut short, or describes a tensor that does not lie inside it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        with self.path.open("rb") as file:
            if file.read(4) != MAGIC:
                raise self.error("is not a GGUF file: it does not start with the bytes 'GGUF'")
            # A private writable mapping: torch views it without a copy and cannot change the file.
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._offset = 4
        with self._reading("the header"):
            self._check_version()
            tensor_count, key_count = self._array("Q", 2)
        self.metadata: dict[str, Any] = {}
        for _ in range(key_count):
            self._read_pair()
        infos = [self._read_tensor_info() for _ in range(tensor_count)]
        start = self._align(self._offset)
        self.tensors: dict[str, TensorInfo] = {}
        for info in infos:
            self._add_tensor(info, start)

    def error(self, message: str) -> GGUFError:
        """An error to raise about this file; ``message`` goes on after its path."""
        return GGUFError(f"{self.path} {message}")

    def require(self, key: str, kind: type[T]) -> T:
        """The value of ``key``. Raises `ValueError` when it is absent or not of type ``kind``."""
        if key not in self.metadata:
            raise self.error(f"has no metadata key {key!r}, which is needed to load it")
        return self._typed(key, kind)

    def get(self, key: str, kind: type[T], default: T) -> T:
        """The value of ``key`` or ``default``. Raises `ValueError` when it has another type."""
        return self._typed(key, kind) if key in self.metadata else default

    def positive(self, key: str) -> int:
        """The integer of ``key``. Raises `ValueError` when it is absent or less than 1."""
        value = self.require(key, int)
        if value < 1:
            raise self.error(f"has {value} in metadata key {key!r}, which must be at least 1")
        return value

    def factor(self, key: str, default: float | None = None) -> float:
        """The number of ``key``, or ``default`` if there is one and the key is absent. Raises
        `ValueError` when it is not above 0 and finite, in float32."""
        value = self.require(key, float) if default is None else self.get(key, float, default)
        if not FLOAT32.tiny <= value <= FLOAT32.max:
            raise self.error(
                f"has {value:g} in metadata key {key!r}, which must be above 0 and finite"
            )
        return value

    def items(self, key: str, *kinds: type) -> list[Any]:
        """The list of ``key``. Raises `ValueError` when it is absent, or holds another type."""
        values = self.require(key, list)
        if others := {type(value) for value in values}.difference(kinds):
            raise self.error(
                f"has a list of {others.pop().__name__} in metadata key {key!r}, not of "
                f"{' or '.join(kind.__name__ for kind in kinds)}"
            )
        return values

    def rows(self, name: str) -> torch.Tensor:
        """The stored bytes of a tensor, ``uint8 [rows, bytes per row]``; a row holds whole blocks.

        A view of the mapped file.
        """
        info = self.tensors[name]
        data = torch.frombuffer(self._data, dtype=torch.uint8, count=info.size, offset=info.offset)
        return data.view(info.rows, -1)

    def _typed(self, key: str, kind: type[T]) -> T:
        value = self.metadata[key]
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            found = type(value).__name__
            raise self.error(f"has {found} in metadata key {key!r}, not {kind.__name__}")
        return value

    def _check_version(self) -> None:
        version = self._scalar("I")
        if version & 0xFFFF == 0:
            raise self.error("is a big-endian GGUF file; convert it to little-endian first")
        if version not in SUPPORTED_VERSIONS:
            known = " and ".join(map(str, SUPPORTED_VERSIONS))
            raise self.error(f"is GGUF version {version}; versions {known} can be read")

    def _read_pair(self) -> None:
        with self._reading(f"metadata key number {len(self.metadata) + 1}"):
            key = self._string()
        with self._reading(f"metadata key {key!r}"):
            if key in self.metadata:
                raise self.error(f"has metadata key {key!r} twice")
            kind = GGUFValueType(self._scalar("I"))
            self.metadata[key] = self._value(kind)

    def _value(self, kind: GGUFValueType) -> Any:
        if kind is GGUFValueType.STRING:
            return self._string()
        if kind is not GGUFValueType.ARRAY:
            value = self._scalar(SCALARS[kind])
            # The shortest decimal of a float32 is the number that the converter was given: 1e-05.
            return float(str(np.float32(value))) if kind is GGUFValueType.FLOAT32 else value
        item = GGUFValueType(self._scalar("I"))
        count = self._scalar("Q")
        self._need(count)  # each takes a byte at least
        if count > MAX_ITEMS:
            raise self.error(
                f"has {count:,} items in a list, and more than {MAX_ITEMS:,} cannot be"
            )
        if item is GGUFValueType.STRING:
            return self._strings(count)
        return list(self._array(SCALARS[item], count))

    def _read_tensor_info(self) -> TensorInfo:
        with self._reading("the list of tensors"):
            name = self._string()
        with self._reading(f"the description of tensor {name!r}"):
            dims = self._scalar("I")
            if not 1 <= dims <= MAX_DIMS:
                raise self.error(f"has {dims} dimensions in tensor {name!r}, not 1 to {MAX_DIMS}")
            shape = tuple(reversed(self._array("Q", dims)))
            kind = GGMLQuantizationType(self._scalar("I"))
            offset = self._scalar("Q")
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if 0 in shape or shape[-1] % block:
            raise self.error(
                f"has shape {list(shape)} in tensor {name!r}, which whole {kind.name} blocks of "
                f"{block} elements cannot fill"
            )
        return TensorInfo(name, kind, shape, offset, math.prod(shape) // block * block_bytes)

    def _align(self, offset: int) -> int:
        alignment = self.get("general.alignment", int, DEFAULT_ALIGNMENT)
        if alignment < 8 or alignment % 8:
            raise self.error(f"has alignment {alignment}, which is not a multiple of 8 bytes")
        return -(-offset // alignment) * alignment

    def _add_tensor(self, info: TensorInfo, start: int) -> None:
        if info.name in self.tensors:
            raise self.error(f"has tensor {info.name!r} twice")
        offset = start + info.offset
        if offset != self._align(offset):
            raise self.error(f"has tensor {info.name!r} at an offset that is not aligned")
        if offset + info.size > len(self._data):
            raise self.error(
                f"ends before the end of tensor {info.name!r}: it has {len(self._data)} bytes, the "
                f"tensor ends at {offset + info.size}"
            )
        self.tensors[info.name] = TensorInfo(info.name, info.type, info.shape, offset, info.size)

    @contextmanager
    def _reading(self, what: str) -> Iterator[None]:
        """Say what was being read when the file turns out to be damaged."""
        try:
            yield
        except GGUFError:
            raise
        except EOFError:
            raise self.error(f"ends inside {what}: it is damaged or not fully copied") from None
        except UnicodeDecodeError as error:
            raise self.error(f"has text that is not UTF-8 in {what}") from error
        except (KeyError, ValueError) as error:
            raise self.error(f"has an unknown or nested value type in {what}: {error}") from error

    def _scalar(self, code: str) -> Any:
        return self._array(code, 1)[0]

    def _array(self, code: str, count: int) -> tuple[Any, ...]:
        size = struct.calcsize(f"<{code}") * count
        self._need(size)
        values = struct.unpack_from(f"<{count}{code}", self._data, self._offset)
        self._offset += size
        return values

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        self._need(8 * count)
        data, offset, end = self._data, self._offset, len(self._data)
        length_at = struct.Struct("<Q").unpack_from
        strings = []
        for _ in range(count):
            if offset + 8 > end:
                raise EOFError
            start = offset + 8
            offset = start + length_at(data, offset)[0]
            if offset > end:
                raise EOFError
            strings.append(data[start:offset].decode())
        self._offset = offset
        return strings

    def _need(self, size: int) -> None:
        if size > len(self._data) - self._offset:
            raise EOFError
