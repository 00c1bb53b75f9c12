"""AWQ checkpoints: what is read is what the layout says, and the rest is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from packed_checkpoints import (
    FEED,
    FILE,
    HIDDEN,
    LAYER,
    Coded,
    change_section,
    change_tensors,
    coded,
    expected_logits,
    logits_of,
    pack_words,
    tiny_config,
    write_checkpoint,
)
from safetensors.torch import load_file, save_file
from transformers import Olmo2Config

from pageloom.models.loading import open_loader
from pageloom.models.model import UnsupportedModelError
from pageloom.plugins import Plugins
from pageloom_quant.awq import AWQLoader
from pageloom_quant.awq.layout import unpack

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
SECTION = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 32,
    "zero_point": True,
    "version": "gemm",
    "modules_to_not_convert": None,
}
BIASED = {"attention_bias": True, "mlp_bias": True}


def awq_tensors(layer: Coded) -> dict[str, torch.Tensor]:
    return {
        "qweight": pack_words(layer.codes.T, ORDER),
        "qzeros": pack_words(layer.zeros.T, ORDER),
        "scales": layer.scales.T,
    }


def write_awq(
    folder: Path, config: Any = None, zeros: bool = True, **changes: Any
) -> dict[str, torch.Tensor]:
    section = SECTION | changes

    def pack(name: str, outputs: int, inputs: int) -> tuple[Coded, dict[str, torch.Tensor]]:
        made = coded(outputs, inputs, section["group_size"], symmetric=not zeros)
        tensors = awq_tensors(made)
        if not zeros:
            del tensors["qzeros"]
        return made, tensors

    return write_checkpoint(folder, config or tiny_config(), section, pack)


def awq(folder: Path) -> AWQLoader:
    return AWQLoader(AWQLoader.Config(), str(folder))


def load_all(folder: Path) -> dict[str, torch.Tensor]:
    loader = awq(folder)
    loader.model_config()
    return dict(loader.tensors())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_awq(tmp_path)
    return tmp_path


@pytest.mark.parametrize("zeros", [True, False], ids=["zeros", "symmetric"])
@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
def test_every_weight_is_what_its_codes_say(tmp_path: Path, group_size: int, zeros: bool) -> None:
    expected = write_awq(tmp_path, group_size=group_size, zero_point=zeros, zeros=zeros)
    found = load_all(tmp_path)
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name].float(), weight), name


def test_the_codes_of_eight_outputs_stand_in_one_number() -> None:
    word = 0x7531_6420  # output 0 in the lowest four bits, then 2, 4, 6, and the odd ones above
    assert unpack(torch.tensor([[word]], dtype=torch.int32)).tolist() == [list(range(8))]


def test_a_negative_number_holds_eight_codes_too() -> None:
    assert unpack(torch.tensor([[-1]], dtype=torch.int32)).tolist() == [[15] * 8]


@pytest.mark.parametrize("zeros", [True, False], ids=["zeros", "symmetric"])
def test_zeros_that_are_stored_count_even_if_the_configuration_says_there_are_none(
    tmp_path: Path, zeros: bool
) -> None:
    expected = write_awq(tmp_path, zero_point=zeros)
    assert torch.equal(load_all(tmp_path)[f"{LAYER}.weight"], expected[f"{LAYER}.weight"])


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "biased"])
def test_layers_that_are_merged_stay_packed(tmp_path: Path, bias: bool) -> None:
    expected = write_awq(tmp_path, tiny_config(**(BIASED if bias else {})))
    loader = awq(tmp_path)
    loader.model_config()
    names = [f"model.layers.0.self_attn.{part}_proj" for part in "qkv"]
    sizes = [expected[f"{name}.weight"].shape[0] for name in names]
    layer = loader.linear(names, HIDDEN, sizes, bias, torch.float32, torch.device("cpu"))
    assert layer is not None
    x = torch.randn(5, HIDDEN)
    weight = torch.cat([expected[f"{name}.weight"] for name in names])
    added = torch.cat([expected[f"{name}.bias"] for name in names]) if bias else None
    torch.testing.assert_close(layer(x), F.linear(x, weight, added), rtol=1e-4, atol=1e-4)
    left = {name for name, _ in loader.tensors()}
    assert not left & {f"{name}.{part}" for name in names for part in ("weight", "bias", "scales")}


@pytest.mark.parametrize(
    "config",
    [
        tiny_config(**BIASED),
        tiny_config(tie_word_embeddings=True),
        tiny_config(Olmo2Config),
    ],
    ids=["decoder", "tied", "transformers"],
)
def test_a_model_computes_what_its_expanded_weights_do(tmp_path: Path, config: Any) -> None:
    state = write_awq(tmp_path, config)
    torch.testing.assert_close(
        logits_of(awq(tmp_path)), expected_logits(config, state), rtol=1e-3, atol=1e-3
    )


def test_a_merged_layer_that_is_packed_in_part_is_expanded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = write_awq(tmp_path)
    name = "model.layers.0.self_attn.k_proj"

    def expand(tensors: dict[str, torch.Tensor]) -> None:
        for part in ("qweight", "qzeros", "scales"):
            del tensors[f"{name}.{part}"]
        tensors[f"{name}.weight"] = state[f"{name}.weight"]

    change_tensors(tmp_path, expand)
    change_section(tmp_path, lambda section: section.update(modules_to_not_convert=["k_proj"]))
    found = logits_of(awq(tmp_path))
    torch.testing.assert_close(found, expected_logits(tiny_config(), state), rtol=1e-3, atol=1e-3)
    assert "q_proj" in caplog.text
    assert "expanded" in caplog.text


def test_the_last_layer_may_be_packed(tmp_path: Path) -> None:
    state = write_awq(tmp_path)
    head = coded(40, HIDDEN, 32)

    def pack_head(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["lm_head.weight"]
        packed = awq_tensors(head)
        tensors.update({f"lm_head.{part}": t.contiguous() for part, t in packed.items()})

    change_tensors(tmp_path, pack_head)
    expected = expected_logits(tiny_config(), state | {"lm_head.weight": head.weight})
    torch.testing.assert_close(logits_of(awq(tmp_path)), expected, rtol=1e-3, atol=1e-3)


def test_it_is_found_by_its_configuration(folder: Path) -> None:
    assert isinstance(open_loader(Plugins.load(), str(folder)), AWQLoader)
    change_section(folder, lambda section: section.update(quant_method="gptq"))
    assert not AWQLoader.detect(str(folder))
    with pytest.raises(ValueError, match=r"config\.json has quant_method 'gptq'.*'awq'"):
        awq(folder).model_config()


def test_the_names_of_autoawq_are_read_too(folder: Path) -> None:
    def rename(section: dict[str, Any]) -> None:
        section["w_bit"], section["q_group_size"] = section.pop("bits"), section.pop("group_size")
        section["version"] = "GEMM"

    before = load_all(folder)
    change_section(folder, rename)
    after = load_all(folder)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_the_configuration_says_nothing_of_how_weights_are_stored(folder: Path) -> None:
    assert not hasattr(awq(folder).model_config(), "quantization_config")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 8}, "8 bits, but only 4"),
        ({"bits": "4"}, "'4' bits, but only 4"),
        ({"version": "gemv"}, "version 'gemv', whose layout"),
        ({"version": "GEMV_fast"}, "version 'GEMV_fast'"),
        ({"version": "marlin"}, "version 'marlin'"),
        ({"version": "exllama"}, "version 'exllama'"),
        ({"version": None}, "version None"),
        ({"group_size": 0}, "groups of 0"),
        ({"group_size": True}, "groups of True"),
        ({"group_size": 1.5}, "groups of 1.5"),
        ({"zero_point": "yes"}, "zero_point 'yes'"),
    ],
)
def test_settings_that_are_not_read_are_refused(
    folder: Path, change: dict[str, Any], message: str
) -> None:
    change_section(folder, lambda section: section.update(change))
    with pytest.raises(ValueError, match=rf"{folder}/config\.json has .*{message}"):
        awq(folder).model_config()


def cut(tensors: dict[str, torch.Tensor], part: str, **how: slice) -> None:
    name = f"{LAYER}.{part}"
    rows, columns = how.get("rows", slice(None)), how.get("columns", slice(None))
    tensors[name] = tensors[name][rows, columns].contiguous()


def spoil(tensors: dict[str, torch.Tensor], value: float) -> None:
    tensors[f"{LAYER}.scales"][1, 3] = value


def turn(tensors: dict[str, torch.Tensor], part: str, dtype: torch.dtype) -> None:
    tensors[f"{LAYER}.{part}"] = tensors[f"{LAYER}.{part}"].to(dtype)


BAD_TENSORS = {
    "no scales": (lambda t: t.pop(f"{LAYER}.scales"), "qweight'.* but no '.*scales'"),
    "no zeros": (lambda t: t.pop(f"{LAYER}.qzeros"), "qweight'.* but no '.*qzeros'"),
    "no codes": (lambda t: t.pop(f"{LAYER}.qweight"), "qzeros'.* but no '.*qweight'"),
    "few codes": (lambda t: cut(t, "qweight", rows=slice(-1)), r"qweight' .*255 inputs .*of 32"),
    "few scales": (lambda t: cut(t, "scales", rows=slice(-1)), r"scales' .*must be .*\[8, 128\]"),
    "narrow scales": (lambda t: cut(t, "scales", columns=slice(8)), r"scales' as float16 \[8, 8\]"),
    "few zeros": (lambda t: cut(t, "qzeros", rows=slice(1)), r"qzeros' .*must be int32 \[8, 16\]"),
    "flat codes": (
        lambda t: t.update({f"{LAYER}.qweight": t[f"{LAYER}.qweight"].flatten()}),
        r"qweight' as int32 \[4096\], but it must be int32 \[any, any\]",
    ),
    "empty codes": (lambda t: cut(t, "qweight", rows=slice(0)), r"qweight' as int32 \[0, 16\]"),
    "wide codes": (lambda t: turn(t, "qweight", torch.int64), "qweight' as int64"),
    "whole scales": (lambda t: turn(t, "scales", torch.int32), "scales' as int32"),
    "NaN": (lambda t: spoil(t, float("nan")), "scales' .* not all of its scales are finite"),
    "infinite": (lambda t: spoil(t, float("inf")), "scales' .* not all of its scales are finite"),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_tensors_that_do_not_fit_are_named(folder: Path, case: str) -> None:
    change, message = BAD_TENSORS[case]
    change_tensors(folder, change)
    loader = awq(folder)
    loader.model_config()
    with pytest.raises(ValueError, match=rf"{folder}/{FILE} has tensor '{LAYER}\.{message}"):
        dict(loader.tensors())
    with pytest.raises(ValueError, match=rf"{folder}/{FILE} has tensor '{LAYER}\.{message}"):
        loader.linear([LAYER], FEED, [HIDDEN], False, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("size", [96, 1])
def test_groups_that_do_not_divide_the_inputs_or_are_odd_are_named(folder: Path, size: int) -> None:
    change_section(folder, lambda section: section.update(group_size=size))
    with pytest.raises(ValueError, match=rf"qweight' .*cannot be cut into even groups of {size}"):
        logits_of(awq(folder))


def test_a_layer_of_another_size_than_the_model_says_is_named(tmp_path: Path) -> None:
    write_awq(tmp_path, tiny_config(intermediate_size=192))
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(
        text.replace('"intermediate_size": 192', '"intermediate_size": 256')
    )
    with pytest.raises(ValueError, match=r"gate_proj\.qweight' .*from 128 to 192.*from 128 to 256"):
        logits_of(awq(tmp_path))


def test_a_bias_that_is_missing_is_named(tmp_path: Path) -> None:
    write_awq(tmp_path, tiny_config(**BIASED))
    change_tensors(tmp_path, lambda tensors: tensors.pop(f"{LAYER}.bias"))
    with pytest.raises(ValueError, match=rf"no '{LAYER}\.bias'"):
        logits_of(awq(tmp_path))


def test_a_bias_that_the_model_has_no_use_for_is_named(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors.update({f"{LAYER}.bias": torch.ones(HIDDEN)}))
    with pytest.raises(UnsupportedModelError, match=rf"unexpected .*{LAYER}\.bias"):
        logits_of(awq(folder))


def test_a_layer_that_is_stored_twice_is_named(folder: Path) -> None:
    change_tensors(
        folder, lambda tensors: tensors.update({f"{LAYER}.weight": torch.ones(HIDDEN, FEED)})
    )
    with pytest.raises(UnsupportedModelError, match=rf"unexpected .*{LAYER}\.weight"):
        logits_of(awq(folder))


def test_scales_of_a_kv_cache_come_apart_from_the_weights(folder: Path) -> None:
    name = "model.layers.0.self_attn.k_scale"
    change_tensors(folder, lambda tensors: tensors.update({name: torch.tensor(0.25)}))
    loader = awq(folder)
    loader.model_config()
    assert name not in dict(loader.tensors())
    assert loader.kv_scales() == {(0, "k"): 0.25}


def test_shards_are_read_by_their_index(folder: Path) -> None:
    before = load_all(folder)
    tensors = load_file(folder / FILE)
    names = sorted(tensors)
    places = {name: f"part-{number % 2}.safetensors" for number, name in enumerate(names)}
    for file in set(places.values()):
        save_file({n: tensors[n] for n in names if places[n] == file}, folder / file)
    (folder / FILE).unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    after = load_all(folder)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("group_size", [32, -1])
def test_autoawq_packs_and_unpacks_the_same(tmp_path: Path, group_size: int) -> None:
    pytest.importorskip("awq", reason="autoawq is not installed")
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    made = coded(64, 128, group_size)
    size = 128 if group_size == -1 else group_size
    plain = torch.nn.Linear(128, 64, bias=False)
    plain.weight.data = made.weight
    layer = WQLinear_GEMM.from_linear(
        plain, 4, size, scales=made.scales.T.contiguous(), zeros=made.zeros.T.contiguous()
    )
    assert torch.equal(layer.qweight, awq_tensors(made)["qweight"])
    assert torch.equal(layer.qzeros, awq_tensors(made)["qzeros"])
    theirs = dequantize_gemm(layer.qweight, layer.qzeros, layer.scales, 4, size)

    folder = tmp_path
    write_awq(folder, group_size=group_size)
    parts = {f"{LAYER}.{part}": tensor for part, tensor in layer.state_dict().items()}
    change_tensors(folder, lambda tensors: tensors.update(parts))
    ours = load_all(folder)[f"{LAYER}.weight"]
    torch.testing.assert_close(ours, theirs.T.float(), rtol=1e-3, atol=0)  # theirs is float16
