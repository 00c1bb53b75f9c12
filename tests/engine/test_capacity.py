"""How many KV blocks fit, and what is said where none does."""

from __future__ import annotations

import pytest
import torch

from pageloom.config import load_config
from pageloom.engine import capacity
from pageloom.errors import PageloomError
from tiny_model import write_engine

GPU = torch.device("cuda:0")
BLOCK = {"bytes_per_block": 4096, "block_size": 16, "max_model_len": 64}


@pytest.fixture
def left(monkeypatch):
    """Say how many bytes a GPU has left after weights and activations."""

    def left(size):
        monkeypatch.setattr(capacity, "_physical_memory", lambda device: 1 << 30)
        monkeypatch.setattr(capacity, "_cuda_budget", lambda *_: (size, 100))

    return left


def test_a_gpu_without_room_is_said_to_need_another_share_or_smaller_steps(tmp_path, left):
    left(-5)
    config = load_config(write_engine(tmp_path))
    with pytest.raises(PageloomError) as raised:
        capacity.count_blocks(config, None, device=GPU, **BLOCK)
    assert str(raised.value) == (
        "no KV block fits: kv_cache.gpu_memory_utilization (after weights and activations) leaves "
        "0 bytes, a block of 16 tokens takes 4,096; raise it, or lower "
        "scheduler.max_num_batched_tokens"
    )


def test_what_a_gpu_has_left_becomes_blocks(tmp_path, left):
    left(3 * 4096 + 1)
    config = load_config(write_engine(tmp_path))
    assert capacity.count_blocks(config, None, device=GPU, **BLOCK).num_blocks == 3


@pytest.mark.parametrize("room", ["null", "0"])
def test_without_room_for_swapping_there_are_no_host_blocks(tmp_path, room):
    config = load_config(write_engine(tmp_path), [f"kv_cache.swap_space={room}"])
    assert capacity.count_host_blocks(config, **BLOCK) == 0
    config = load_config(write_engine(tmp_path), ["kv_cache.swap_space=8KiB"])
    assert capacity.count_host_blocks(config, **BLOCK) == 2


def test_engines_of_one_machine_share_its_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(capacity, "_physical_memory", lambda device: 1 << 30)
    path, long = write_engine(tmp_path), BLOCK | {"max_model_len": 1 << 40}
    found = []
    for replicas in (1, 4):
        given = ["kv_cache.num_blocks=null", f"parallel.replicas={replicas}"]
        config = load_config(path, ["kv_cache.memory=null", *given])
        found.append(capacity.count_blocks(config, None, device=torch.device("cpu"), **long))
    alone, one_of_four = (each.num_blocks for each in found)
    assert alone // 4 == one_of_four > 0
