"""The engine tells where its memory went."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from pageloom import Engine
from pageloom.engine.memory_report import MemoryReport, show_bytes, weight_bytes
from tiny_model import CONFIG, MAX_MODEL_LEN, VOCAB, write_model

HIDDEN, MLP = CONFIG["hidden_size"], CONFIG["intermediate_size"]
KV = HIDDEN // CONFIG["num_attention_heads"] * CONFIG["num_key_value_heads"]
LAYER = HIDDEN * (2 * HIDDEN + 2 * KV + 3 * MLP + 2)
WEIGHTS = 2 * LAYER + 2 * VOCAB * HIDDEN + HIDDEN  # embedding and output layer are not tied


@pytest.fixture
def paged(build):
    def paged(**overrides):
        return build(attention__backend="torch_paged", **{"kv_cache__num_blocks": 4} | overrides)

    return paged


def test_the_weights_of_the_decoder_are_its_parameters(paged):
    assert paged().memory.weights == {"float32": 4 * WEIGHTS}
    packed = paged(model__dtype="bfloat16")  # maybe for oneDNN
    assert packed.memory.weights == {"bfloat16": 2 * WEIGHTS}


def test_the_cache_and_what_fits_into_it(paged):
    memory = paged(
        kv_cache__block_size=4, kv_cache__num_blocks=35, kv_cache__swap_space=10_000
    ).memory
    per_token = 2 * 2 * KV * 4  # K and V, two layers, float32
    assert memory.kv_format == "float32"
    assert memory.kv_bytes_per_token == per_token
    assert (memory.kv_tokens, memory.kv_bytes) == (140, 140 * per_token)
    assert memory.longest_requests == 140 // MAX_MODEL_LEN == 2
    assert memory.host_bytes == memory.host_blocks * 4 * per_token <= 10_000
    assert memory.host_blocks == 10_000 // (4 * per_token)
    assert memory.activations is None


def test_a_quantized_cache_is_called_by_its_format(paged):
    plain = paged().memory
    memory = paged(kv_cache__quantizer="int8_token_head").memory
    assert memory.kv_format == "int8_token_head"
    assert memory.kv_bytes * 4 * 8 == plain.kv_bytes * 12  # of 8 floats: 8 codes and a float


def test_models_of_transformers_are_counted_too(tmp_path):
    write_model(tmp_path, model_type="stablelm", architectures=["StableLmForCausalLM"])
    config = tmp_path / "engine.yaml"
    config.write_text(
        f"model: {{path: {tmp_path}, loader: dummy, dtype: float32}}\n"
        "attention: {backend: torch_paged}\n"
        "kv_cache: {num_blocks: 4}\nruntime: {device: cpu, num_threads: 1}\n"
    )
    engine = Engine.from_config(config)
    parts = engine.runner.model.weights()
    parameters = {id(p): p.nbytes for part in parts for p in part.parameters()}
    assert sum(parameters.values()) > 4 * WEIGHTS  # its norms have biases
    frequencies = engine.memory.weights["float32"] - sum(parameters.values())
    assert 0 < frequencies <= 16  # of its rotary embedding, which turns a quarter of a head


class Packed(nn.Module):
    """What a loader may supply: no parameters, and tensors wherever its author kept them."""

    def __init__(self):
        super().__init__()
        self.codes = torch.zeros(10, dtype=torch.uint8)
        self.tables = {"scales": [torch.zeros(3, dtype=torch.float16)]}
        self.register_buffer("zeros", torch.zeros(5, dtype=torch.int32))
        self.more = Fields(torch.zeros(2))


@dataclass
class Fields:
    minimums: torch.Tensor


def test_all_tensors_of_a_module_count_by_dtype():
    assert weight_bytes([Packed()]) == {"int32": 20, "uint8": 10, "float32": 8, "float16": 6}


def test_a_module_may_say_its_format_and_speaks_for_its_parts():
    whole = nn.Sequential(Packed(), nn.Linear(2, 1, bias=False))
    whole.weight_format = "int4"
    whole[1].weight_format = "plain"
    assert weight_bytes([whole, torch.zeros(4)]) == {"int4": 44, "float32": 16, "plain": 8}


def test_what_is_shared_counts_once():
    weight = torch.zeros(6, 2)
    first, second = nn.Linear(2, 6, bias=False), nn.Linear(2, 6, bias=False)
    first.weight = second.weight = nn.Parameter(weight)
    assert weight_bytes([weight, first, second, weight.view(12)]) == {"float32": 48}


def test_tensors_without_memory_count_nothing():
    assert weight_bytes([torch.empty(0), torch.empty(9, device="meta")]) == {}


@pytest.fixture
def memory():
    return MemoryReport(
        device="cuda:0",
        weights={"int4": 3 << 30, "bfloat16": 5 << 20},
        kv_format="fp8_e4m3",
        block_size=16,
        num_blocks=1000,
        bytes_per_block=16 * 1536,
        max_model_len=100,
        host_blocks=10,
        activations=1 << 20,
    )


def test_the_report_is_a_few_lines(memory):
    assert list(memory.lines()) == [
        "memory of cuda:0: weights 3.0 GiB (int4 3.0 GiB, bfloat16 5.0 MiB)",
        "  activations: 1.0 MiB in the largest step",
        "  KV cache: 23.4 MiB of fp8_e4m3, 1.5 KiB per token; 1,000 blocks of 16 tokens, room "
        "for 16,000, which is 142 requests of max_model_len 100",
        "  host memory for swapped blocks: 240.0 KiB at most, 10 blocks",
    ]


def test_it_is_logged_when_the_engine_starts(paged, caplog):
    caplog.set_level(logging.INFO, "pageloom")
    engine = paged()
    assert [r.message for r in caplog.records if r.name == "pageloom.engine.assemble"] == list(
        engine.memory.lines()
    )


@pytest.mark.parametrize(
    ("size", "shown"),
    [(0, "0 bytes"), (1023, "1,023 bytes"), (1536, "1.5 KiB"), (22.5 * 1024, "22.5 KiB"),
     (1 << 20, "1.0 MiB"), (5 << 40, "5,120.0 GiB")],
)  # fmt: skip
def test_sizes_have_the_unit_that_suits_them(size, shown):
    assert show_bytes(size) == shown
