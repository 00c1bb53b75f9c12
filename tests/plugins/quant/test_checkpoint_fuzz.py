"""Damaged checkpoints of packed weights: one kind of error, or weights as large as the file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_checkpoints import FILE
from safetensors.torch import load_file, save
from test_awq import write_awq
from test_compressed_tensors import write

from pageloom.contract import WeightLoader
from pageloom_quant.awq import AWQLoader
from pageloom_quant.compressed_tensors import CompressedTensorsLoader

EXPANSION = 8  # of 4 bits to float32
LOADERS = {"awq": AWQLoader, "compressed_tensors": CompressedTensorsLoader}
DTYPES = [
    *("BOOL", "U8", "I8", "I16", "U16", "I32", "U32", "I64", "U64", "F16", "BF16", "F32", "F64"),
    *("F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "C64", "F6_E2M3", "?"),
]
SIZES = st.one_of(st.integers(0, 300), st.integers(-(2**65), 2**65))
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), SIZES, st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {name: tmp_path_factory.mktemp(name) for name in LOADERS}
    write_awq(folders["awq"])
    write(folders["compressed_tensors"], symmetric=False)
    return folders


def load(kind: str, folder: Path) -> None:
    loader: WeightLoader = LOADERS[kind](LOADERS[kind].Config(), str(folder))
    try:
        loader.model_config()
        loader.kv_scales()
        size = sum(tensor.nbytes for _, tensor in loader.tensors())
    except (ValueError, OSError):
        return
    assert size <= EXPANSION * (folder / FILE).stat().st_size


def split(data: bytes) -> tuple[dict[str, Any], bytes]:
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def join(header: dict[str, Any], body: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


@contextmanager
def replaced(file: Path, content: bytes) -> Iterator[None]:
    before = file.read_bytes()
    file.write_bytes(content)
    try:
        yield
    finally:
        file.write_bytes(before)


@pytest.mark.parametrize("kind", LOADERS)
@settings(max_examples=30)
@given(data=st.data())
def test_any_change_of_a_header_is_survived(
    kind: str, originals: dict[str, Path], data: st.DataObject
) -> None:
    file = originals[kind] / FILE
    header, body = split(file.read_bytes())
    name = data.draw(st.sampled_from([name for name in header if name != "__metadata__"]))
    part = data.draw(st.sampled_from(["dtype", "shape", "data_offsets", "whole", "gone"]))
    if part == "gone":
        del header[name]
    elif part == "whole":
        header[name] = data.draw(JSON)
    elif part == "dtype":
        header[name][part] = data.draw(st.sampled_from(DTYPES))
    else:
        header[name][part] = data.draw(st.lists(SIZES, max_size=4))
    with replaced(file, join(header, body)):
        load(kind, originals[kind])


@pytest.mark.parametrize("kind", LOADERS)
@settings(max_examples=30)
@given(data=st.data())
def test_a_tensor_of_another_shape_and_dtype_is_survived(
    kind: str, originals: dict[str, Path], data: st.DataObject
) -> None:
    """The file agrees with itself, so that what is wrong is for the loader to find."""
    file = originals[kind] / FILE
    tensors = load_file(file)
    name = data.draw(st.sampled_from(sorted(tensors)))
    shape = data.draw(st.lists(st.integers(0, 40), max_size=3))
    dtype = data.draw(st.sampled_from([torch.int32, torch.int8, torch.float16, torch.int64]))
    tensors[name] = torch.zeros(shape, dtype=dtype)
    with replaced(file, save(tensors)):
        load(kind, originals[kind])


@pytest.mark.parametrize("kind", LOADERS)
@settings(max_examples=30)
@given(data=st.data())
def test_any_change_of_bytes_is_survived(
    kind: str, originals: dict[str, Path], data: st.DataObject
) -> None:
    file = originals[kind] / FILE
    content = bytearray(file.read_bytes())
    end = 8 + int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(0, 4))):
        content[data.draw(st.integers(0, end))] = data.draw(st.integers(0, 255))
    length = data.draw(st.one_of(st.none(), st.integers(0, len(content))))
    with replaced(file, bytes(content[:length])):
        load(kind, originals[kind])


@pytest.mark.parametrize("kind", LOADERS)
@settings(max_examples=30)
@given(data=st.data())
def test_any_change_of_the_configuration_is_survived(
    kind: str, originals: dict[str, Path], data: st.DataObject
) -> None:
    file = originals[kind] / "config.json"
    content = json.loads(file.read_text())
    where = content["quantization_config"]
    while True:  # down to a section, and there one entry
        key = data.draw(st.sampled_from(sorted(where)))
        if not isinstance(where[key], dict) or not where[key] or data.draw(st.booleans()):
            break
        where = where[key]
    where[key] = data.draw(JSON)
    with replaced(file, json.dumps(content).encode()):
        load(kind, originals[kind])
