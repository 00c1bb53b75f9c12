"""What the two torch backends promise beyond the contract."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pageloom.contract import LayerSpec
from pageloom.testing.attention_candidate import Candidate
from pageloom.testing.attention_cases import Case
from pageloom.testing.attention_rig import Rig
from pageloom.testing.attention_shadow import Branch
from pageloom_attention import attend
from pageloom_attention.naive_contiguous import NaiveContiguous
from pageloom_attention.torch_paged import TorchPaged, group_by_length

LAYER = LayerSpec(num_heads=4, num_kv_heads=2, head_size=16, scale=0.25)
SHORT = {"max_model_len": 96}
BACKENDS = pytest.mark.parametrize("backend", [TorchPaged, NaiveContiguous])


def candidate(backend):
    return Candidate(backend.__name__, backend, torch.device("cpu"))


@given(st.lists(st.integers(1, 900), max_size=70), st.integers(0, 2000), st.integers(1, 5000))
def test_decodes_are_grouped_without_much_padding(lengths, call_cost, most_tokens):
    groups = group_by_length(lengths, call_cost, most_tokens)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    for group in groups:
        longest = max(lengths[i] for i in group)
        assert sum(longest - lengths[i] for i in group) <= call_cost
        assert len(group) == 1 or longest * len(group) <= most_tokens


def test_decodes_of_one_length_are_one_group():
    assert group_by_length([7, 7, 7], call_cost=0, most_tokens=21) == [[0, 1, 2]]


def test_a_group_is_closed_only_when_the_next_decode_does_not_fit():
    assert group_by_length([5, 9, 8, 1], call_cost=5, most_tokens=99) == [[1, 2, 0], [3]]
    assert group_by_length([5, 5, 5], call_cost=5, most_tokens=10) == [[0, 1], [2]]


@pytest.mark.parametrize("window", [None, 1, 5, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_masks_are_causal_and_aligned(dtype, window):
    """On a GPU, `scaled_dot_product_attention` refuses masks whose rows are not."""
    masks = attend.CausalMasks(dtype, torch.device("cpu"))
    for length, rows in [(5, 5), (3, 1), (40, 7), (33, 33), (600, 256), (599, 256), (305, 1)]:
        mask = masks.cut(rows, length, window)
        assert mask.data_ptr() % 16 == mask.stride(0) * mask.itemsize % 16 == 0
        distance = torch.arange(length - rows, length).unsqueeze(1) - torch.arange(length)
        seen = (distance >= 0) & (distance < (window or length))
        assert torch.equal(mask == 0, seen)
        assert torch.equal(mask.isneginf(), ~seen)


@pytest.mark.parametrize("requested", [None, 96])
def test_the_block_of_naive_contiguous_is_the_whole_context(requested):
    assert NaiveContiguous.block_size(requested, max_model_len=96) == 96


def test_naive_contiguous_has_no_other_block_size():
    with pytest.raises(ValueError, match=r"max_model_len = 96 .* not blocks of 16: leave kv_cache"):
        NaiveContiguous.block_size(16, max_model_len=96)
    spec = replace(candidate(NaiveContiguous).spec(Case((LAYER,), **SHORT)), block_size=16)
    assert "not blocks of 16" in NaiveContiguous.check(spec)


@pytest.mark.parametrize(("requested", "answer"), [(None, 16), (1, 1), (48, 48)])
def test_torch_paged_has_any_block_size(requested, answer):
    assert TorchPaged.block_size(requested, max_model_len=96) == answer


@BACKENDS
def test_a_dtype_that_attention_is_not_computed_in_is_refused(backend):
    reason = candidate(backend).refusal(Case((LAYER,), torch.float8_e4m3fn))
    assert "computes in float32, bfloat16, float16, float64, not float8_e4m3fn" in reason


@BACKENDS
def test_bytes_per_block_is_what_the_cache_takes(backend):
    other = replace(LAYER, num_kv_heads=1, head_size=40)
    rig = Rig(candidate(backend), Case((LAYER, other), torch.bfloat16))
    # The zero rows, each among 16 that are no block's.
    spare = 16 * sum(2 * layer.head_size * 2 for layer in (LAYER, other))
    held = sum(cache.numel() * cache.itemsize for cache in rig.backend.cache)
    assert held == rig.bytes_per_block * rig.backend.num_blocks + spare


@BACKENDS
@pytest.mark.parametrize("feature", [{"softcap": 2.0}, {"sinks": True}])
def test_scores_of_long_prompts_are_computed_in_parts(backend, feature, monkeypatch):
    most = []
    explicit = attend.explicit_attention

    def watched(q, k, *rest):
        most.append(q.shape[:-1].numel() * k.shape[-2])
        return explicit(q, k, *rest)

    monkeypatch.setattr(attend, "SCORES", 1000)
    monkeypatch.setattr(attend, "explicit_attention", watched)
    rig = Rig(candidate(backend), Case((replace(LAYER, **feature),), **SHORT))
    branch = Branch()
    rig.step((branch, 40))
    rig.step((branch, 30))
    assert max(most[-30:]) <= 1000


def test_a_windowed_decode_does_not_read_what_lies_before_its_window(monkeypatch):
    rig = Rig(candidate(TorchPaged), Case((replace(LAYER, window=5), LAYER)))
    branches = [Branch() for _ in range(2)]
    rig.step(*((branch, n) for branch, n in zip(branches, (60, 3), strict=True)))
    gather, read = rig.backend.gather, {}

    def watched(layer, rows):
        read[layer] = rows.shape[-1]
        return gather(layer, rows)

    monkeypatch.setattr(rig.backend, "gather", watched)
    rig.step(*((branch, 1) for branch in branches))
    assert read == {0: 16, 1: 64}  # tokens 5 and 61, in whole vectors
