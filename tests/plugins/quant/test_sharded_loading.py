"""Packed weights divided over ranks: each reads its part, and together they are the whole model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType as Kind
from gguf_writing import tiny_model, write_gguf
from packed_checkpoints import change_tensors, tiny_config
from test_awq import write_awq
from test_compressed_tensors import write as write_compressed
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from groups import Threads, on_ranks
from pageloom.contract import Alone, Group, Slice, WeightLoader
from pageloom.engine.memory_report import weight_bytes
from pageloom.models.build import build_model
from pageloom.models.model import Attend, Model, UnsupportedModelError
from pageloom_quant.awq import AWQLoader
from pageloom_quant.compressed_tensors import CompressedTensorsLoader
from pageloom_quant.gguf import GGUFLoader
from pageloom_quant.packed import PackedWeight
from reference import DenseAttention

CPU = torch.device("cpu")
LAYERS = {"num_hidden_layers": 2}
UNEVEN = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 32}
BIASED = {"attention_bias": True, "mlp_bias": True}
Q, K, DOWN = (f"model.layers.0.{name}_proj" for name in ("self_attn.q", "self_attn.k", "mlp.down"))
HEAD = "lm_head"

Made = Callable[[], WeightLoader]


def awq(folder: Path) -> AWQLoader:
    return AWQLoader(AWQLoader.Config(), str(folder))


def compressed(folder: Path) -> CompressedTensorsLoader:
    return CompressedTensorsLoader(CompressedTensorsLoader.Config(), str(folder))


def gguf(path: Path, expand: bool | None = None) -> GGUFLoader:
    return GGUFLoader(GGUFLoader.Config(dequantize=expand), str(path))


def built(loader: WeightLoader, group: Group) -> Model:
    config = loader.model_config()
    return build_model(
        loader, config, dtype=torch.float32, device=CPU, max_model_len=64, group=group
    )


def logits_of(model: Model) -> torch.Tensor | None:
    """Of a few tokens; None of a stage that has none."""
    ids = torch.arange(3, 20)
    attend = DenseAttention(model.layers).step([(0, len(ids))])
    hidden = model.forward(ids, torch.arange(len(ids)), Attend(attend))
    return model.logits(hidden) if model.group.rank.is_last else None


def assert_divides(make: Made, tensor_size: int, stages: int = 1, atol: float = 1e-4) -> None:
    """The ranks' logits are those of the whole model, and no linear layer is less packed."""
    whole = built(make(), Alone())
    expected = logits_of(whole)
    assert expected is not None
    assert expected.std() > 0.1

    def compute(group: Threads) -> tuple[Any, set[str]]:
        model = built(make(), group)
        return logits_of(model), formats(model)

    for logits, kinds in on_ranks(compute, tensor_size, stages)[-tensor_size:]:
        assert kinds <= formats(whole)
        torch.testing.assert_close(logits, expected, atol=atol, rtol=1e-4)


def formats(model: Model) -> set[str]:
    """Of the linear layers: what is packed, and ``plain``."""
    modules = [part for part in model.weights() if isinstance(part, torch.nn.Module)]
    return {getattr(module, "weight_format", "plain") for module in modules}


@pytest.mark.parametrize(("tensor_size", "stages"), [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
@pytest.mark.parametrize("zeros", [True, False], ids=["zeros", "symmetric"])
def test_awq(tmp_path: Path, zeros: bool, group_size: int, tensor_size: int, stages: int) -> None:
    # Of 128 inputs of the layer after attention, a rank has 64: groups of 128 are cut.
    config = tiny_config(**LAYERS, **BIASED)
    write_awq(tmp_path, config, zeros, zero_point=zeros, group_size=group_size)
    assert_divides(lambda: awq(tmp_path), tensor_size, stages)


@pytest.mark.parametrize(("tensor_size", "stages"), [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize(
    ("strategy", "group_size"), [("group", 32), ("group", 128), ("channel", None)]
)
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
def test_compressed_tensors(
    tmp_path: Path,
    symmetric: bool,
    strategy: str,
    group_size: int | None,
    tensor_size: int,
    stages: int,
) -> None:
    config = tiny_config(**LAYERS, **BIASED)
    scheme = {"strategy": strategy, "group_size": group_size, "symmetric": symmetric}
    write_compressed(tmp_path, config, **scheme)
    assert_divides(lambda: compressed(tmp_path), tensor_size, stages)


@pytest.mark.parametrize("tensor_size", [2, 3])
def test_heads_need_not_be_divided_evenly(tmp_path: Path, tensor_size: int) -> None:
    write_awq(tmp_path, tiny_config(**LAYERS, **UNEVEN))
    assert_divides(lambda: awq(tmp_path), tensor_size)


@pytest.mark.parametrize("write", [write_awq, write_compressed])
def test_merged_layers_that_are_packed_in_part_are_divided_expanded(
    tmp_path: Path, write: Callable[..., dict[str, torch.Tensor]]
) -> None:
    state = write(tmp_path, tiny_config(**LAYERS))

    def expand(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(f"{K}.")]:
            del tensors[name]
        tensors[f"{K}.weight"] = state[f"{K}.weight"]

    change_tensors(tmp_path, expand)
    loader = awq if write is write_awq else compressed
    assert_divides(lambda: loader(tmp_path), 2, 2)


SIZES = {
    "vocab_size": 97,  # not a multiple of the ranks
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": None,
}
GGUF = {
    "llama": LlamaConfig(**SIZES, **BIASED),
    "llama tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama uneven": LlamaConfig(**SIZES | UNEVEN),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3 tied": Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True),
}


def write_model(folder: Path, config: Any, kind: Callable[[str], Kind | None]) -> Path:
    return write_gguf(folder / "model.gguf", tiny_model(config), config.model_type, {}, kind=kind)


@pytest.mark.parametrize("expand", [False, True], ids=["packed", "expanded"])
@pytest.mark.parametrize(("tensor_size", "stages"), [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("name", GGUF)
def test_gguf(tmp_path: Path, name: str, tensor_size: int, stages: int, expand: bool) -> None:
    def kind(tensor: str) -> Kind:
        return Kind.Q8_0 if "embd" in tensor or tensor == "output.weight" else Kind.Q4_1

    path = write_model(tmp_path, GGUF[name], kind)
    assert_divides(lambda: gguf(path, expand), tensor_size, stages)


@pytest.mark.parametrize("kind", [None, Kind.F16, Kind.BF16, Kind.Q5_0], ids=str)
def test_gguf_of_types_that_cannot_stay_packed(tmp_path: Path, kind: Kind | None) -> None:
    path = write_model(tmp_path, GGUF["llama"], lambda name: kind)
    assert_divides(lambda: gguf(path, None), 2, 2)


def test_the_demo_model(demo_path: Path) -> None:
    """9 query heads and 3 key-value heads over 2 ranks, output layer and embedding in one. Packed
    and expanded, whole, it differs from itself by a thousandth too, after 30 layers."""
    assert_divides(lambda: gguf(demo_path), 2, atol=5e-3)


def test_no_rank_holds_more_than_its_part_of_a_packed_model(tmp_path: Path) -> None:
    config = LlamaConfig(**SIZES | {"vocab_size": 128, "intermediate_size": 256})
    path = write_model(tmp_path, config, lambda name: Kind.Q4_0)
    whole = weight_bytes(built(gguf(path, False), Alone()).weights())
    assert whole["int4"] > whole["float32"] / 4
    held = on_ranks(lambda group: weight_bytes(built(gguf(path, False), group).weights()), 2, 2)
    for each in held:
        # Of the layers a quarter; embedding and head, half of one of them.
        assert each["int4"] < 1.15 * whole["int4"] / 2
        assert sum(each.values()) < 1.15 * sum(whole.values()) / 2


ODD = [Slice(0, 3, 21, 64), Slice(0, 32, 64, 64), Slice(1, 5, 50, 128), Slice(1, 64, 128, 128)]


def square_config() -> Any:
    """Whose query layer maps 128 to 64."""
    return tiny_config(num_attention_heads=4, num_key_value_heads=2, head_dim=16)


@pytest.fixture(params=["awq", "compressed", "channel", "gguf"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Made:
    """A loader whose ``q_proj`` is [64, 128]."""
    if request.param == "awq":
        write_awq(tmp_path, square_config())
        return lambda: awq(tmp_path)
    if request.param == "compressed":
        write_compressed(tmp_path, square_config(), symmetric=False)
        return lambda: compressed(tmp_path)
    if request.param == "channel":
        write_compressed(tmp_path, square_config(), strategy="channel", group_size=None)
        return lambda: compressed(tmp_path)
    config = LlamaConfig(**SIZES | {"hidden_size": 128, "head_dim": 16})
    path = write_model(tmp_path, config, lambda name: Kind.Q4_1)
    return lambda: gguf(path, False)


@pytest.mark.parametrize("part", ODD, ids=str)
def test_any_part_of_a_weight_can_be_had_expanded(make: Made, part: Slice) -> None:
    whole, cut = make(), make()
    name = f"{Q}.weight"
    expected = part.of(name, dict(whole.tensors())[name])
    assert torch.equal(dict(cut.tensors_of({name: part}))[name], expected)


def test_what_is_needed_nowhere_is_not_unpacked(make: Made) -> None:
    whole, cut = make(), make()
    expected = dict(whole.tensors())
    parts = dict.fromkeys((f"{Q}.weight", "model.norm.weight", "model.embed_tokens.weight"))
    found = dict(cut.tensors_of(parts))
    assert expected.keys() - found.keys() == parts.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


@pytest.mark.parametrize("part", [ODD[0], ODD[1], Slice(1, 32, 96, 128), ODD[3]], ids=str)
def test_a_part_of_a_weight_multiplies_as_it_does_expanded(make: Made, part: Slice) -> None:
    whole, cut = make(), make()
    weight = part.of(Q, dict(whole.tensors())[f"{Q}.weight"]).float()
    layer = cut.linear([Q], 128, [64], False, torch.float32, CPU, parts=[part])
    assert layer is not None
    x = torch.randn(5, weight.shape[1])
    torch.testing.assert_close(layer(x), F.linear(x, weight), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("call", "dim"),
    [
        (lambda loader, part: dict(loader.tensors_of({f"{Q}.weight": part})), 0),
        (
            lambda loader, part: loader.linear(
                [Q], 128, [64], False, torch.float32, CPU, parts=[part]
            ),
            1,
        ),
    ],
    ids=["tensors", "linear"],
)
def test_a_weight_that_is_not_what_was_divided_is_named(
    make: Made, call: Callable[[WeightLoader, Slice], Any], dim: int
) -> None:
    message = rf"tensor '{Q}\.weight' is \[64, 128\], but dimension {dim}, .* must have 256 elem"
    with pytest.raises(ValueError, match=message):
        call(make(), Slice(dim, 0, 128, 256))


def test_inputs_are_cut_where_groups_begin(make: Made, tmp_path: Path) -> None:
    loader = make()
    assert loader.supports_parts
    assert loader.input_unit(DOWN) == 32
    write_awq(tmp_path, tiny_config(), group_size=128)
    assert awq(tmp_path).input_unit(DOWN) == 128
    assert awq(tmp_path).input_unit(HEAD) == 1


REFUSED = "set parallel.tensor_parallel_size so that they are not"


@pytest.mark.parametrize(
    ("write", "loader", "tensor"),
    [(write_awq, awq, "qweight"), (write_compressed, compressed, "weight_packed")],
    ids=["awq", "compressed"],
)
def test_groups_that_would_be_too_small_are_refused_with_the_numbers(
    tmp_path: Path, write: Callable[..., Any], loader: Any, tensor: str
) -> None:
    write(tmp_path, tiny_config(num_key_value_heads=4, head_dim=24))
    message = (
        rf"o_proj\.{tensor}' as int32 .*, whose groups of 32 inputs would be cut at (0 and 48|48 "
        rf"and 96) into some that are too small; {REFUSED}"
    )
    with pytest.raises(ValueError, match=message):
        on_ranks(lambda group: built(loader(tmp_path), group), 2)


def test_blocks_that_would_be_cut_are_refused_and_can_be_expanded(tmp_path: Path) -> None:
    config = LlamaConfig(**SIZES | {"head_dim": 8, "num_key_value_heads": 4})
    path = write_model(tmp_path, config, lambda name: Kind.Q4_1)
    message = (
        r"model\.gguf has blocks of 32 inputs in tensor 'blk\.0\.attn_output\.weight', which would "
        rf"be cut at (0 and 16|16 and 32); {REFUSED}, or model\.options\.dequantize to true"
    )
    with pytest.raises(ValueError, match=message):
        on_ranks(lambda group: built(gguf(path, False), group), 2)
    assert_divides(lambda: gguf(path, True), 2)


def test_an_mlp_of_fewer_groups_than_ranks_is_refused(tmp_path: Path) -> None:
    write_awq(tmp_path, tiny_config(num_key_value_heads=4), group_size=128)
    message = r"256 MLP neurons in 2 groups of 128 cannot be divided over 4 ranks"
    with pytest.raises(UnsupportedModelError, match=message):
        on_ranks(lambda group: built(awq(tmp_path), group), 4)


def packed(bits: int, group_size: int) -> PackedWeight:
    codes = torch.randint(0, 1 << bits, (6, 128)).byte()
    scales, minimums = torch.rand(6, 128 // group_size), torch.rand(6, 128 // group_size)
    if bits == 4:
        return PackedWeight.from_codes(codes, scales, minimums)
    return PackedWeight(codes, scales, minimums, group_size, bits)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("group_size", "start", "end", "left"),
    [
        (32, 32, 96, 32),
        (64, 0, 64, 64),
        (64, 32, 128, 32),
        (16, 16, 48, 16),
        (128, 0, 64, 64),
        (128, 96, 128, 32),
        (128, 2, 50, 48),
    ],
)
def test_inputs_of_a_packed_weight_are_cut(
    bits: int, group_size: int, start: int, end: int, left: int
) -> None:
    weight = packed(bits, group_size)
    part = weight.columns(start, end)
    assert part.group_size == left
    assert torch.equal(
        part.dequantize(torch.float32), weight.dequantize(torch.float32)[:, start:end]
    )


@pytest.mark.parametrize(
    ("group_size", "cuts"),
    [(32, (16, 64)), (64, (0, 48)), (128, (1, 63)), (128, (2, 12)), (16, (8, 16))],
)
def test_inputs_that_cannot_be_cut_are_refused(group_size: int, cuts: Sequence[int]) -> None:
    with pytest.raises(ValueError, match=rf"groups of {group_size} of 128 .* at {cuts[0]} and"):
        packed(4, group_size).columns(*cuts)
