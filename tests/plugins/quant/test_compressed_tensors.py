"""compressed-tensors checkpoints: 4-bit packed weights are read, everything else is refused."""

from __future__ import annotations

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
from transformers import Olmo2Config

from pageloom.models.loading import open_loader
from pageloom.plugins import Plugins
from pageloom_quant.compressed_tensors import CompressedTensorsLoader
from pageloom_quant.compressed_tensors.settings import Settings, read_settings

CPU = torch.device("cpu")


def section(**weights: Any) -> dict[str, Any]:
    """A ``quantization_config`` as llm-compressor writes it."""
    scheme = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "group_size": 32,
        "strategy": "group",
        "block_structure": None,
        "dynamic": False,
        "actorder": None,
        "observer": "minmax",
        "observer_kwargs": {},
    }
    group = {
        "targets": ["Linear"],
        "weights": scheme | weights,
        "input_activations": None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def tensors_of(layer: Coded, symmetric: bool) -> dict[str, torch.Tensor]:
    packed = {
        "weight_packed": pack_words(layer.codes),
        "weight_scale": layer.scales,
        "weight_shape": torch.tensor(layer.codes.shape),
    }
    if not symmetric:
        packed["weight_zero_point"] = pack_words(layer.zeros.T).T
    return packed


def write(
    folder: Path, config: Any = None, dtype: torch.dtype = torch.bfloat16, **weights: Any
) -> dict[str, torch.Tensor]:
    content = section(**weights)
    scheme = content["config_groups"]["group_0"]["weights"]
    size = scheme["group_size"] if scheme["strategy"] == "group" else -1

    def pack(name: str, outputs: int, inputs: int) -> tuple[Coded, dict[str, torch.Tensor]]:
        made = coded(outputs, inputs, size, scheme["symmetric"], dtype)
        return made, tensors_of(made, scheme["symmetric"])

    return write_checkpoint(folder, config or tiny_config(), content, pack)


def loader_of(folder: Path) -> CompressedTensorsLoader:
    return CompressedTensorsLoader(CompressedTensorsLoader.Config(), str(folder))


def load_all(folder: Path) -> dict[str, torch.Tensor]:
    loader = loader_of(folder)
    loader.model_config()
    return dict(loader.tensors())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path)
    return tmp_path


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize(
    ("strategy", "group_size", "dtype"),
    [
        ("group", 32, torch.bfloat16),
        ("group", 128, torch.float16),
        ("channel", None, torch.bfloat16),
        ("channel", -1, torch.float32),
    ],
)
def test_every_weight_is_what_its_codes_say(
    tmp_path: Path, strategy: str, group_size: int | None, dtype: torch.dtype, symmetric: bool
) -> None:
    expected = write(
        tmp_path, dtype=dtype, strategy=strategy, group_size=group_size, symmetric=symmetric
    )
    found = load_all(tmp_path)
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        # Only scales of 16 bits leave room in float32 for a product with a code.
        exact = 0.0 if dtype.itemsize == 2 else 1e-6
        torch.testing.assert_close(found[name].float(), weight, rtol=0, atol=exact)


def test_zero_points_of_older_files_are_not_packed(tmp_path: Path) -> None:
    expected = write(tmp_path, symmetric=False)

    def unpack(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("weight_zero_point")]:
            outputs = len(tensors[name.replace("zero_point", "scale")])
            words = tensors[name].T[:, :, None] >> torch.arange(0, 32, 4) & 15
            tensors[name] = (words.flatten(1)[:, :outputs].T - 8).to(torch.int8).contiguous()

    change_tensors(tmp_path, unpack)
    found = load_all(tmp_path)
    assert all(torch.equal(found[name].float(), weight) for name, weight in expected.items())


def test_the_last_number_of_zero_points_may_be_part_empty(tmp_path: Path) -> None:
    write(tmp_path, symmetric=False)
    name, layer = "model.layers.0.odd", coded(20, 64, 32)
    tensors = tensors_of(layer, symmetric=True)
    padded = torch.cat([layer.zeros, torch.zeros(4, 2, dtype=torch.int64)])
    tensors["weight_zero_point"] = pack_words(padded.T).T.contiguous()
    change_tensors(tmp_path, lambda t: t.update({f"{name}.{p}": v for p, v in tensors.items()}))
    loader = loader_of(tmp_path)
    weight = loader.packed_weight(name, loader.layout(name), slice(0, 20), slice(0, 64))
    assert torch.equal(weight.dequantize(torch.float32), layer.weight)


def test_layers_that_are_merged_stay_packed(tmp_path: Path) -> None:
    expected = write(tmp_path, symmetric=False)
    loader = loader_of(tmp_path)
    loader.model_config()
    names = [f"model.layers.0.mlp.{part}_proj" for part in ("gate", "up")]
    layer = loader.linear(names, HIDDEN, [FEED, FEED], False, torch.float32, CPU)
    assert layer is not None
    x = torch.randn(5, HIDDEN)
    weight = torch.cat([expected[f"{name}.weight"] for name in names])
    torch.testing.assert_close(layer(x), F.linear(x, weight), rtol=1e-4, atol=1e-4)
    left = {name for name, _ in loader.tensors()}
    assert not left & {f"{name}.weight" for name in names}


@pytest.mark.parametrize(
    "config", [tiny_config(), tiny_config(Olmo2Config)], ids=["decoder", "transformers"]
)
def test_a_model_computes_what_its_expanded_weights_do(tmp_path: Path, config: Any) -> None:
    state = write(tmp_path, config, symmetric=False)
    torch.testing.assert_close(
        logits_of(loader_of(tmp_path)), expected_logits(config, state), rtol=1e-3, atol=1e-3
    )


def test_it_is_found_by_its_configuration(folder: Path) -> None:
    assert isinstance(open_loader(Plugins.load(), str(folder)), CompressedTensorsLoader)


def test_groups_are_told_apart_by_name_then_pattern_then_class() -> None:
    content = section()
    base = content["config_groups"]["group_0"]

    def group(targets: list[str], size: int) -> dict[str, Any]:
        return base | {"targets": targets, "weights": base["weights"] | {"group_size": size}}

    content["config_groups"] = {
        "all": group(["Linear"], 32),
        "downs": group([r"re:.*down_proj$"], 64),
        "one": group(["model.layers.1.mlp.down_proj"], 128),
    }
    content["ignore"] = ["lm_head", r"re:.*\.self_attn\..*"]
    settings = read_settings(content)
    sizes = {
        "model.layers.0.mlp.up_proj": 32,
        "model.layers.0.mlp.down_proj": 64,
        "model.layers.1.mlp.down_proj": 128,
        "model.layers.0.self_attn.q_proj": None,
        "lm_head": None,
    }
    for layer, size in sizes.items():
        scheme = settings.scheme_of(layer)
        assert (scheme and scheme.group_size) == size, layer


@pytest.mark.parametrize(("preset", "symmetric"), [("W4A16", True), ("W4A16_ASYM", False)])
def test_presets_are_known_by_name(preset: str, symmetric: bool) -> None:
    content = section() | {"config_groups": {preset: ["Linear"]}}
    scheme = read_settings(content).scheme_of("model.layers.0.mlp.up_proj")
    assert scheme is not None
    assert (scheme.group_size, scheme.symmetric) == (128, symmetric)


@pytest.mark.parametrize("order", ["weight", "static", None, False])
def test_orders_that_change_nothing_are_read(tmp_path: Path, order: object) -> None:
    expected = write(tmp_path, actorder=order)
    assert torch.equal(load_all(tmp_path)[f"{LAYER}.weight"], expected[f"{LAYER}.weight"])


def group_of(content: dict[str, Any]) -> dict[str, Any]:
    group: dict[str, Any] = content["config_groups"]["group_0"]
    return group


REFUSED = {
    **{
        name: (lambda s, name=name: s.update(format=name), f"in the format '{name}'")
        for name in (
            "float-quantized",
            "int-quantized",
            "naive-quantized",
            "nvfp4-pack-quantized",
            "mxfp4-pack-quantized",
            "marlin-24",
            "dense",
        )
    },
    "no format": (lambda s: s.pop("format"), "in the format None"),
    "format of a group": (
        lambda s: group_of(s).update(format="float-quantized"),
        r"group_0 in the format 'float-quantized'",
    ),
    "8 bits": (lambda s: group_of(s)["weights"].update(num_bits=8), "'int' with 8 bits"),
    "float": (lambda s: group_of(s)["weights"].update(type="float"), "'float' with 4 bits"),
    "tensor": (lambda s: group_of(s)["weights"].update(strategy="tensor"), "strategy 'tensor'"),
    "no size": (lambda s: group_of(s)["weights"].update(group_size=None), "group_size None"),
    "size 0": (lambda s: group_of(s)["weights"].update(group_size=0), "group_size 0"),
    "order": (lambda s: group_of(s)["weights"].update(actorder="group"), "actorder 'group'"),
    "dynamic order": (
        lambda s: group_of(s)["weights"].update(actorder="dynamic"),
        "actorder 'dynamic'",
    ),
    "symmetric": (lambda s: group_of(s)["weights"].update(symmetric=1), "symmetric 1"),
    "activations": (
        lambda s: group_of(s).update(input_activations={"num_bits": 8}),
        "input_activations, but this loader quantizes no activations",
    ),
    "no weights": (lambda s: group_of(s).pop("weights"), "weights None"),
    "no targets": (lambda s: group_of(s).pop("targets"), "targets None"),
    "bad pattern": (lambda s: s.update(ignore=["re:("]), r"ignore 're:\(', which is no pattern"),
    "bad ignore": (lambda s: s.update(ignore="lm_head"), "ignore 'lm_head', which must be a list"),
    "no groups": (lambda s: s.update(config_groups={}), "no config_groups"),
    "odd group": (lambda s: s.update(config_groups={"a": 3}), "config_groups.a 3"),
    "preset": (lambda s: s.update(config_groups={"W8A8": ["Linear"]}), "the preset 'W8A8'"),
    "sparse": (lambda s: s.update(sparsity_config={"format": "sparse-24-bitmask"}), "a sparsity"),
    "turned": (lambda s: s.update(transform_config={"config_groups": {}}), "a transform_config"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_are_not_read_are_refused(folder: Path, case: str) -> None:
    change, message = REFUSED[case]
    change_section(folder, change)
    with pytest.raises(ValueError, match=rf"{folder}/config\.json has .*{message}"):
        loader_of(folder).model_config()


def cut(tensors: dict[str, torch.Tensor], part: str, where: Any) -> None:
    tensors[f"{LAYER}.{part}"] = tensors[f"{LAYER}.{part}"][where].contiguous()


BAD_TENSORS = {
    "no scale": (lambda t: t.pop(f"{LAYER}.weight_scale"), "weight_packed'.* no '.*weight_scale'"),
    "no zero": (
        lambda t: t.pop(f"{LAYER}.weight_zero_point"),
        "weight_packed'.* no '.*weight_zero_point'",
    ),
    "no shape": (lambda t: t.pop(f"{LAYER}.weight_shape"), "weight_packed'.* no '.*weight_shape'"),
    "no codes": (
        lambda t: t.pop(f"{LAYER}.weight_packed"),
        "weight_scale'.* no '.*weight_packed'",
    ),
    "few codes": (
        lambda t: cut(t, "weight_packed", slice(-1)),
        r"weight_shape'.* says \[128, 256\], but the codes are \[127, 256\]",
    ),
    "few scales": (
        lambda t: cut(t, "weight_scale", (slice(None), slice(1))),
        r"weight_scale'.* must be .*\[128, 8\]",
    ),
    "few zeros": (
        lambda t: cut(t, "weight_zero_point", slice(1)),
        r"weight_zero_point'.* must be int32 \[16, 8\]",
    ),
    "NaN": (
        lambda t: t[f"{LAYER}.weight_scale"].fill_(float("nan")),
        "weight_scale'.* not all of its scales are finite",
    ),
    "float codes": (
        lambda t: t.update({f"{LAYER}.weight_packed": t[f"{LAYER}.weight_packed"].float()}),
        "weight_packed' as float32",
    ),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, case: str) -> None:
    write(tmp_path, symmetric=False)
    change, message = BAD_TENSORS[case]
    change_tensors(tmp_path, change)
    with pytest.raises(ValueError, match=rf"{tmp_path}/{FILE} has tensor '{LAYER}\.{message}"):
        load_all(tmp_path)


def test_a_packed_layer_that_should_be_ignored_is_named(folder: Path) -> None:
    change_section(folder, lambda s: s["ignore"].append(LAYER))
    with pytest.raises(ValueError, match=rf"{LAYER}\.weight_packed'.*this layer is not quantized"):
        load_all(folder)


def test_zero_points_of_symmetric_codes_are_named(tmp_path: Path) -> None:
    write(tmp_path, symmetric=False)
    change_section(tmp_path, lambda s: group_of(s)["weights"].update(symmetric=True))
    with pytest.raises(ValueError, match=r"weight_zero_point'.* says that its codes are symmetric"):
        load_all(tmp_path)


def test_scales_of_a_kv_cache_come_apart_from_the_weights(folder: Path) -> None:
    names = [f"model.layers.0.self_attn.{kind}_scale" for kind in "kv"]
    change_section(folder, lambda s: s.update(kv_cache_scheme={"num_bits": 8, "type": "float"}))
    change_tensors(
        folder, lambda t: t.update({n: torch.tensor([0.5 + i]) for i, n in enumerate(names)})
    )
    loader = loader_of(folder)
    loader.model_config()
    assert not dict(loader.tensors()).keys() & set(names)
    assert loader.kv_scales() == {(0, "k"): 0.5, (0, "v"): 1.5}


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("strategy", ["group", "channel"])
def test_the_package_itself_packs_and_unpacks_the_same(
    tmp_path: Path, strategy: str, symmetric: bool
) -> None:
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationScheme

    size = 32 if strategy == "group" else None
    write(tmp_path, strategy=strategy, group_size=size, symmetric=symmetric)
    made = coded(HIDDEN, FEED, size or -1, symmetric, torch.bfloat16)
    weights = section(strategy=strategy, group_size=size, symmetric=symmetric)
    scheme = QuantizationScheme(
        targets=["Linear"], weights=weights["config_groups"]["group_0"]["weights"]
    )
    state = {
        "weight": made.weight,
        "weight_scale": made.scales,
        "weight_zero_point": (made.zeros - 8).to(torch.int8),
    }
    packed = PackedQuantizationCompressor.compress(state, scheme)
    theirs = PackedQuantizationCompressor.decompress(packed, scheme)["weight"]
    assert torch.equal(packed["weight_packed"], tensors_of(made, symmetric)["weight_packed"])
    change_tensors(tmp_path, lambda t: t.update({f"{LAYER}.{p}": v for p, v in packed.items()}))
    ours = load_all(tmp_path)[f"{LAYER}.weight"]
    torch.testing.assert_close(ours, theirs.float(), rtol=1e-2, atol=0)  # theirs is bfloat16


def test_a_pattern_that_would_match_for_ages_is_an_error() -> None:
    settings = Settings((), (r"re:([a-z_.0-9]|[a-z_.0-9]{2})*_proj[0-9]",))
    with pytest.raises(ValueError, match="takes more than 1 s to match"):
        settings.scheme_of(f"model.layers.0.{'x' * 200}_proj")
