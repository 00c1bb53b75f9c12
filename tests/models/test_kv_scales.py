"""Scales of the KV cache in a checkpoint are found by every name they go by, and are no weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from pageloom import Engine
from pageloom.contract.kv_scales import is_kv_scale
from pageloom.errors import PageloomError
from pageloom.models.hf import HFLoader

WEIGHT = "model.layers.0.self_attn.k_proj.weight"


def write(folder: Path, *files: dict[str, torch.Tensor]) -> HFLoader:
    """A loader of a checkpoint of these files, and an index if they are several."""
    names = [f"model-{n}.safetensors" for n in range(len(files))]
    for file, tensors in zip(names, files, strict=True):
        save_file(tensors, folder / file)
    if len(files) > 1:
        places = {name: file for file, each in zip(names, files, strict=True) for name in each}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return HFLoader(HFLoader.Config(), str(folder))


ATTENTION = "model.layers.3.self_attn"


@pytest.mark.parametrize(
    ("k", "v"),
    [
        ("k_scale", "v_scale"),
        ("attn.k_scale", "attn.v_scale"),
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("qkv_proj.k_scale", "qkv_proj.v_scale"),
        ("k_proj.output_scale", "v_proj.output_scale"),
    ],
)
@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_usual_name_is_found(tmp_path, k, v, shape, dtype):
    scales = {k: torch.full(shape, 0.25, dtype=dtype), v: torch.full(shape, 0.5, dtype=dtype)}
    named = {f"{ATTENTION}.{name}": scale for name, scale in scales.items()}
    loader = write(tmp_path, {WEIGHT: torch.zeros(2, 2), **named})
    assert loader.kv_scales() == {(3, "k"): 0.25, (3, "v"): 0.5}
    assert [name for name, _ in loader.tensors()] == [WEIGHT]


def test_the_old_common_scale_is_for_both(tmp_path):
    loader = write(tmp_path, {f"{ATTENTION}.kv_scale": torch.tensor(0.5)})
    assert loader.kv_scales() == {(3, "k"): 0.5, (3, "v"): 0.5}
    assert list(loader.tensors()) == []


@pytest.mark.parametrize(
    "name",
    [
        "layers.12.self_attn.k_scale",
        "transformer.h.12.attn.k_scale",
        "model.language_model.layers.12.self_attn.attn.k_scale",
    ],
)
def test_the_layer_is_the_first_number(tmp_path, name):
    assert write(tmp_path, {name: torch.tensor(2.0)}).kv_scales() == {(12, "k"): 2.0}


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.0.self_attn.k_proj.weight_scale",
        "model.layers.0.self_attn.k_proj.input_scale",
        "model.layers.0.self_attn.o_proj.output_scale",
        "model.layers.0.mlp.down_proj.output_scale",
        "model.k_scale",
    ],
)
def test_weights_and_their_scales_are_not_taken_for_it(name):
    assert not is_kv_scale(name)


def test_scales_may_lie_in_any_shard(tmp_path):
    loader = write(
        tmp_path,
        {WEIGHT: torch.zeros(2, 2), f"{ATTENTION}.k_scale": torch.tensor(0.25)},
        {f"{ATTENTION}.v_scale": torch.tensor(0.5)},
    )
    assert loader.kv_scales() == {(3, "k"): 0.25, (3, "v"): 0.5}
    assert [name for name, _ in loader.tensors()] == [WEIGHT]


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.ones(8), r"of shape \[8\], but .* one number for all heads of a layer"),
        (torch.ones(1, 8, 1), r"of shape \[1, 8, 1\]"),
        (torch.ones(1, 1), r"of shape \[1, 1\]"),
        (torch.ones(0), r"of shape \[0\]"),
        (torch.tensor(1), "as int64, but a scale must be floating point"),
        (torch.tensor(torch.nan), "= nan, but a scale must be finite and above 0"),
        (torch.tensor(torch.inf), "= inf, but"),
        (torch.tensor(0.0), "= 0, but"),
        (torch.tensor(-1.0), "= -1, but"),
    ],
)
def test_a_scale_of_no_use_is_named_with_its_file(tmp_path, tensor, message):
    loader = write(tmp_path, {f"{ATTENTION}.v_scale": tensor})
    pattern = rf"model-0\.safetensors has '{ATTENTION}\.v_scale' {message}"
    with pytest.raises(ValueError, match=pattern):
        loader.kv_scales()
    assert list(loader.tensors()) == []


def test_two_scales_for_one_place_must_agree(tmp_path):
    one, other = f"{ATTENTION}.kv_scale", f"{ATTENTION}.v_scale"
    loader = write(tmp_path, {one: torch.tensor(0.5), other: torch.tensor(0.5)})
    assert loader.kv_scales() == {(3, "k"): 0.5, (3, "v"): 0.5}
    loader = write(tmp_path, {one: torch.tensor(0.5), other: torch.tensor(0.25)})
    with pytest.raises(ValueError, match=rf"'{other}' = 0\.25, but '{one}' is 0\.5; remove one"):
        loader.kv_scales()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Folders of a small model whose checkpoint has these tensors beside its weights."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(**sizes, **heads, vocab_size=64, max_position_embeddings=64)
    model = LlamaForCausalLM(config)

    def checkpoint(beside, **changes):
        folder = tmp_path_factory.mktemp("model")
        model.save_pretrained(folder)
        save_file({**model.state_dict(), **beside}, folder / "model.safetensors")
        content = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(content | changes))
        (folder / "engine.yaml").write_text(
            f"model: {{path: {folder}}}\n"
            "kv_cache: {num_blocks: 8}\n"
            "attention: {backend: torch_paged}\n"
            "runtime: {device: cpu}\n"
        )
        return folder / "engine.yaml"

    return checkpoint


def scales(k: float, v: float) -> dict[str, torch.Tensor]:
    return {
        f"model.layers.{n}.self_attn.{kind}_scale": torch.tensor(scale)
        for n in range(2)
        for kind, scale in (("k", k), ("v", v))
    }


def quantizer_of(engine):
    return engine.runner.backend.quantizer


def test_an_engine_stores_with_the_scales_of_its_checkpoint(checkpoint):
    path = checkpoint(scales(0.25, 0.5))
    quantizer = quantizer_of(Engine.from_config(path, ["kv_cache.quantizer=fp8_e4m3"]))
    assert [quantizer.static_scale(1, kind) for kind in "kv"] == [0.25, 0.5]
    given = ["kv_cache.quantizer=fp8_e4m3", "kv_cache.options.k_scale=2.0"]
    quantizer = quantizer_of(Engine.from_config(path, given))
    assert [quantizer.static_scale(1, kind) for kind in "kv"] == [2.0, 0.5]


@pytest.mark.parametrize("overrides", [[], ["kv_cache.quantizer=int8_token_head"]])
def test_scales_that_nothing_asks_for_may_be_anything(checkpoint, caplog, overrides):
    engine = Engine.from_config(checkpoint(scales(float("nan"), -1.0)), overrides)
    assert len(engine.generate([[1, 2, 3]])[0].outputs[0].token_ids) > 0
    assert caplog.records == []


PER_HEAD = {f"model.layers.0.self_attn.{kind}_scale": torch.ones(2) for kind in "kv"}


@pytest.mark.parametrize(
    "beside", [scales(float("nan"), 1.0), scales(1.0, 0.0), scales(1e-40, 1.0), PER_HEAD]
)
def test_scales_of_no_use_do_not_matter_where_the_yaml_gives_others(checkpoint, caplog, beside):
    fp8 = ["kv_cache.quantizer=fp8_e4m3", "kv_cache.options.k_scale=2.0"]
    engine = Engine.from_config(checkpoint(beside), [*fp8, "kv_cache.options.v_scale=0.5"])
    assert [quantizer_of(engine).static_scale(1, kind) for kind in "kv"] == [2.0, 0.5]
    assert len(engine.generate([[1, 2, 3]])[0].outputs[0].token_ids) > 0
    assert caplog.records == []


def test_it_is_said_how_to_start_without_the_scales_of_a_checkpoint(checkpoint):
    half = ["kv_cache.quantizer=fp8_e4m3", "kv_cache.options.k_scale=2.0"]
    with pytest.raises(
        PageloomError, match=r"= nan, .*; set kv_cache\.options k_scale and v_scale"
    ):
        Engine.from_config(checkpoint(scales(1.0, float("nan"))), half)


@pytest.mark.parametrize(
    ("beside", "message"),
    [
        (scales(float("nan"), 1.0), r"^model .*model\.safetensors has 'model\.layers\.0.* = nan"),
        (scales(1e-40, 1.0), r"^kv_cache\.quantizer fp8_e4m3: the checkpoint's k_scale of layer 0"),
        (
            {"model.layers.2.self_attn.k_scale": torch.tensor(1.0)},
            r"^kv_cache\.quantizer fp8_e4m3: .*layer 2, but the model has 2 layers",
        ),
    ],
)
def test_an_engine_refuses_scales_of_no_use_in_one_sentence(checkpoint, beside, message):
    with pytest.raises(PageloomError, match=message) as raised:
        Engine.from_config(checkpoint(beside), ["kv_cache.quantizer=fp8_e4m3"])
    assert "\n" not in str(raised.value)


KV_ONLY = {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}}


@pytest.mark.parametrize("groups", [{}, {"config_groups": {}}, {"config_groups": {"0": {}}}])
def test_a_checkpoint_that_is_quantized_in_its_cache_only_is_read(checkpoint, groups):
    path = checkpoint(scales(0.25, 0.5), quantization_config=KV_ONLY | groups)
    assert HFLoader.detect(str(path.parent))
    quantizer = quantizer_of(Engine.from_config(path, ["kv_cache.quantizer=fp8_e4m3"]))
    assert quantizer.static_scale(0, "k") == 0.25


@pytest.mark.parametrize(
    "more", [{"config_groups": {"0": {"weights": {"num_bits": 4}}}}, {"quant_algo": "FP8"}]
)
def test_one_with_quantized_weights_too_is_left_to_others(checkpoint, more):
    path = checkpoint({}, quantization_config=KV_ONLY | more)
    assert not HFLoader.detect(str(path.parent))
