"""What each rank has of a model: all of it, nothing twice that need not be, and evenly."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pageloom.contract import Rank
from pageloom.models.architecture import DecoderArchitecture
from pageloom.models.model import UnsupportedModelError
from pageloom.models.shards import Shard, divide, divide_heads

ARCH = DecoderArchitecture(
    vocab_size=131,
    hidden_size=64,
    intermediate_size=100,
    num_heads=9,
    num_kv_heads=3,
    head_size=8,
    norm_eps=1e-6,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    qk_norm=False,
    tied=False,
    windows=(None, 7, None, 7, None),
)


@given(
    size=st.integers(1, 10_000),
    parts=st.integers(1, 40),
    unit=st.sampled_from([1, 2, 32, 128]),
)
def test_a_size_is_divided_into_all_of_it_as_evenly_as_units_allow(size, parts, unit):
    units = -(-size // unit)
    if units < parts:
        with pytest.raises(
            UnsupportedModelError, match=rf"{size} things.*{parts} ranks.*N to {units} "
        ):
            divide(size, parts, "things", "N", unit)
        return
    ranges = divide(size, parts, "things", "N", unit)
    assert len(ranges) == parts
    assert [n for each in ranges for n in each] == list(range(size))
    assert all(each.start % unit == 0 for each in ranges)
    widths = [-(-len(each) // unit) for each in ranges]
    assert widths == sorted(widths, reverse=True)
    assert widths[0] - widths[-1] <= 1


def test_heads_are_divided_with_the_key_value_heads_that_they_share():
    assert divide_heads(9, 3, 1) == [(range(9), range(3))]
    assert divide_heads(9, 3, 2) == [(range(6), range(2)), (range(6, 9), range(2, 3))]
    assert divide_heads(9, 3, 3) == [(range(3 * n, 3 * n + 3), range(n, n + 1)) for n in range(3)]


def test_fewer_key_value_heads_than_ranks_are_copied():
    assert divide_heads(8, 2, 4) == [
        (range(2), range(1)),
        (range(2, 4), range(1)),
        (range(4, 6), range(1, 2)),
        (range(6, 8), range(1, 2)),
    ]
    assert divide_heads(9, 3, 9) == [(range(n, n + 1), range(n // 3, n // 3 + 1)) for n in range(9)]


@given(kv=st.integers(1, 12), group=st.integers(1, 12), ranks=st.integers(1, 36))
def test_every_head_has_one_rank_and_its_key_value_head_is_there(kv, group, ranks):
    try:
        divided = divide_heads(kv * group, kv, ranks)
    except UnsupportedModelError:
        assert ranks > kv
        assert ranks % kv or group % (ranks // kv)
        return
    assert [head for heads, _ in divided for head in heads] == list(range(kv * group))
    for heads, kv_heads in divided:
        assert sorted({head // group for head in heads}) == list(kv_heads)
        assert len(heads) % len(kv_heads) == 0


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "message"),
    [
        (9, 3, 4, r"3 key-value heads cannot be copied to 4 ranks evenly \(4 / 3 is not whole\)"),
        (9, 3, 6, r"6 ranks each of 3 .* would be on 2, .*\(3 / 2 is not whole\)"),
        (4, 4, 8, r"8 ranks .*\(1 / 2 is not whole\).*tensor_parallel_size to 4 or"),
    ],
)
def test_heads_that_cannot_be_divided_are_refused_with_the_arithmetic(
    heads, kv_heads, ranks, message
):
    with pytest.raises(UnsupportedModelError, match=message):
        divide_heads(heads, kv_heads, ranks)


def test_stages_have_consecutive_layers_and_their_windows():
    shards = [Shard.of(ARCH, Rank.of(n, 2, 2)) for n in range(4)]
    assert [shard.layers for shard in shards] == [range(3), range(3), range(3, 5), range(3, 5)]
    assert [spec.window for spec in shards[2].own(ARCH).layer_specs()] == [7, None]
    assert [spec.num_heads for spec in shards[2].own(ARCH).layer_specs()] == [6, 6]
    assert [spec.num_kv_heads for spec in shards[3].own(ARCH).layer_specs()] == [1, 1]
    assert [shard.vocab for shard in shards[:2]] == [range(66), range(66, 131)]
    assert [shard.mlp(ARCH, 32) for shard in shards[:2]] == [range(64), range(64, 100)]


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        (Rank(0, 1, 0, 6), r"5 layers .* 6 ranks; set parallel\.pipeline_parallel_size to 5 or"),
        (Rank(0, 200, 0, 1), r"tensor_parallel_size"),
    ],
)
def test_a_model_that_is_too_small_is_refused(rank, message):
    with pytest.raises(UnsupportedModelError, match=message):
        Shard.of(ARCH, rank)


def test_an_mlp_of_too_few_groups_is_refused():
    shard = Shard.of(ARCH, Rank(0, 3, 0, 1))
    message = r"100 MLP neurons in 2 groups of 64 .* 3 ranks; set .* to 2 or less"
    with pytest.raises(UnsupportedModelError, match=message):
        shard.mlp(ARCH, 64)
