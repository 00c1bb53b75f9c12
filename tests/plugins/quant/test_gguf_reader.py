"""The header reader agrees with `gguf.GGUFReader`, and answers damage with one clear error."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_writing import tiny_model, write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from pageloom_quant.gguf import GGUFLoader
from pageloom_quant.gguf.reader import MAX_ITEMS, GGUFFile


def small_file(path: Path) -> Path:
    """A file with a value of every type and one tensor."""
    writer = gguf.GGUFWriter(path, "llama")
    for kind in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"):
        getattr(writer, f"add_{kind}")(f"a.{kind}", 7)
    writer.add_float32("a.float32", 1e-5)
    writer.add_float64("a.float64", 1e-5)
    writer.add_bool("a.bool", True)
    writer.add_string("a.string", "h\u00e9")
    writer.add_array("a.strings", ["", "\u2581a", "b"])
    writer.add_array("a.ints", [1, -2, 3])
    writer.add_array("a.floats", [0.5, -1.0])
    writer.add_array("a.bools", [True, False])
    writer.add_tensor("t.weight", np.arange(64, dtype=np.float32).reshape(2, 32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_file(tmp_path_factory.mktemp("gguf") / "small.gguf")


def header(version: int = 3, tensors: int = 0, keys: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


@pytest.mark.parametrize("which", ["demo", "small"])
def test_it_reads_what_gguf_reads(
    which: str, small: Path, demo_path: Path, demo_reference: gguf.GGUFReader
) -> None:
    file = GGUFFile(demo_path if which == "demo" else small)
    reference = demo_reference if which == "demo" else gguf.GGUFReader(small)
    expected = {
        key: field.contents()
        for key, field in reference.fields.items()
        if not key.startswith("GGUF.")
    }
    assert file.metadata.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, float):
            value = pytest.approx(value, rel=1e-7)
        assert file.metadata[key] == value
    assert [(t.name, t.type, list(t.shape), t.offset, t.size) for t in file.tensors.values()] == [
        (t.name, t.tensor_type, t.shape.tolist()[::-1], t.data_offset, t.n_bytes)
        for t in reference.tensors
    ]
    last = reference.tensors[-1]
    assert file.rows(last.name).numpy().tobytes() == last.data.tobytes()


def test_a_float32_reads_as_the_decimal_it_was_written_from(small: Path) -> None:
    assert GGUFFile(small).metadata["a.float32"] == 1e-5


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "does not start with the bytes 'GGUF'"),
        (b"PK\x03\x04" + bytes(40), "does not start with the bytes 'GGUF'"),
        (b"GGUF", "ends inside the header"),
        (header(version=1), "is GGUF version 1; versions 2 and 3 can be read"),
        (header(version=4), "is GGUF version 4"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "is a big-endian GGUF file"),
        (header(keys=1), "ends inside metadata key number 1"),
        (header(keys=2**63), "ends inside metadata key number 1"),
        (header(tensors=2**63), "ends inside the list of tensors"),
        (header(keys=1) + struct.pack("<Q", 2**63), "ends inside metadata key number 1"),
        (header(keys=1) + text("k"), "ends inside metadata key 'k'"),
        (header(keys=1) + text("k") + struct.pack("<I", 99), "value type in metadata key 'k'"),
        (
            header(keys=1) + text("k") + struct.pack("<IIQ", 9, 9, 1) + bytes(40),
            "unknown or nested value type in metadata key 'k'",
        ),
        (
            header(keys=1) + text("k") + struct.pack("<IIQ", 9, 4, 2**61),
            "ends inside metadata key 'k'",
        ),
        (
            header(keys=1) + text("k") + struct.pack("<IIQ", 9, 8, 2**60),
            "ends inside metadata key 'k'",
        ),
        (
            header(keys=1) + text("k") + struct.pack("<IQ", 8, 1) + b"\xff",
            "not UTF-8 in metadata key 'k'",
        ),
        (
            header(keys=2) + 2 * (text("k") + struct.pack("<IB", 0, 1)),
            "metadata key 'k' twice",
        ),
        (
            header(keys=1) + text("general.alignment") + struct.pack("<II", 4, 3),
            "alignment 3",
        ),
        (
            header(tensors=1) + text("t") + struct.pack("<IQQIQ", 9, 1, 1, 0, 0),
            "9 dimensions in tensor 't'",
        ),
        (
            header(tensors=1) + text("t") + struct.pack("<IQIQ", 1, 32, 999, 0),
            "value type in the description of tensor 't'",
        ),
        (
            header(tensors=1) + text("t") + struct.pack("<IQIQ", 1, 33, 2, 0),
            "shape [33] in tensor 't', which whole Q4_0 blocks of 32 elements cannot fill",
        ),
        (
            header(tensors=1) + text("t") + struct.pack("<IQIQ", 1, 8, 0, 0),
            "ends before the end of tensor 't'",
        ),
        (
            header(tensors=1) + text("t") + struct.pack("<IQIQ", 1, 8, 0, 2**63),
            "ends before the end of tensor 't'",
        ),
        (
            header(tensors=1) + text("t") + struct.pack("<IQIQ", 1, 8, 0, 7) + bytes(99),
            "'t' at an offset that is not aligned",
        ),
        (
            header(tensors=2) + 2 * (text("t") + struct.pack("<IQIQ", 1, 1, 0, 0)) + bytes(99),
            "has tensor 't' twice",
        ),
    ],
)
def test_damage_is_one_clear_error(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"bad\.gguf ") as raised:
        GGUFFile(path)
    assert message in str(raised.value)


def test_a_list_of_more_items_than_memory_should_hold_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "long.gguf"
    with path.open("wb") as file:
        file.write(header(keys=1) + text("k") + struct.pack("<IIQ", 9, 0, MAX_ITEMS + 1))
        file.truncate(MAX_ITEMS + 1000)
    with pytest.raises(ValueError, match=r"long\.gguf has 16,777,217 items in a list, and more"):
        GGUFFile(path)


def test_every_cut_of_a_file_is_refused(small: Path, tmp_path: Path) -> None:
    data = small.read_bytes()
    path = tmp_path / "cut.gguf"
    for length in range(0, len(data), 3):
        path.write_bytes(data[:length])
        with pytest.raises(ValueError, match=r"cut\.gguf "):
            GGUFFile(path)


@pytest.fixture(scope="module")
def model_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A whole tiny model with a tokenizer."""
    config = LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    keys = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": ["<s>", "a", "b", "ab", "c", "abc", "\u0120", "</s>"],
        "tokenizer.ggml.token_type": [3, 1, 1, 1, 1, 1, 1, 3],
        "tokenizer.ggml.merges": ["a b", "ab c"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 7,
    }
    path = tmp_path_factory.mktemp("gguf") / "whole.gguf"
    return write_gguf(path, tiny_model(config), "llama", keys).read_bytes()


def load_all(path: Path) -> None:
    loader = GGUFLoader(GGUFLoader.Config(), str(path))
    loader.model_config()
    loader.tokenizer()
    for _ in loader.tensors():
        pass


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_flipped_bytes_load_or_raise_value_error(
    tmp_path_factory: pytest.TempPathFactory, model_bytes: bytes, data: st.DataObject
) -> None:
    content = bytearray(model_bytes)
    header_end = content.index(b"blk.0.ffn_up.weight") + 60
    for _ in range(data.draw(st.integers(0, 3))):
        place = data.draw(st.integers(4, header_end))
        content[place] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "flipped.gguf"
    path.write_bytes(content)
    if content == model_bytes:
        load_all(path)
        return
    try:
        load_all(path)
    except ValueError as error:
        assert str(path) in str(error)  # noqa: PT017 - an error is allowed, not required


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="absent"):
        GGUFFile(tmp_path / "absent.gguf")


def test_detect_knows_the_magic_and_the_suffix(small: Path, tmp_path: Path) -> None:
    renamed = tmp_path / "weights"
    renamed.write_bytes(small.read_bytes())
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"")
    other = tmp_path / "other.bin"
    other.write_bytes(b"PK")
    found = {path.name: GGUFLoader.detect(str(path)) for path in (small, renamed, damaged, other)}
    assert found == {"small.gguf": True, "weights": True, "damaged.gguf": True, "other.bin": False}
    assert not GGUFLoader.detect(str(tmp_path))
    assert not GGUFLoader.detect("org/name")
