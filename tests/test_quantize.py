"""``pageloom quantize``: what it refuses, what it writes, and that the result runs."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from pageloom import Engine, SamplingParams
from pageloom.cli import main
from pageloom.errors import PageloomError
from pageloom.models.loading import open_loader
from pageloom.plugins import Plugins
from pageloom.quantize.awq import check_group_size, check_sizes
from pageloom.quantize.calibration import calibration_text, cut_windows
from pageloom.quantize.model import open_model
from reference import random_model

CODES = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
HAS_AUTOAWQ = importlib.util.find_spec("awq") is not None


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """A token for each printable ASCII character."""
    backend = Tokenizer(models.BPE({chr(33 + n): n for n in range(94)}, [], unk_token="!"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="#")


@pytest.fixture
def plain(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Path:
    """A model that is not quantized."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(
        **sizes, **heads, vocab_size=96, eos_token_id=2, tie_word_embeddings=True, dtype="bfloat16"
    )
    folder = tmp_path / "plain"
    model = random_model(config)
    for module in model.model.layers.modules():
        if isinstance(module, torch.nn.Linear):  # as in real models, some inputs matter more
            module.weight.data *= torch.randn(module.in_features).exp()
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def with_autoawq(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it were installed, for what is refused before it is called."""
    monkeypatch.setattr("pageloom.quantize.awq.require_autoawq", lambda: None)


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["quantize", *map(str, arguments)])
    return int(ended.value.code or 0)


def test_without_autoawq_it_says_what_it_is_for(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "awq", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert run(plain, "--out", tmp_path / "new") == 2
    said = capsys.readouterr().err
    assert "needs the package autoawq" in said
    assert "pip install 'pageloom[awq]'" in said


@pytest.mark.usefixtures("with_autoawq")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "{plain}"], "plain exists already"),
        (["--out", "{plain}/no/where"], "there is no folder"),
        (["--group-size", "48"], "must be one of 32, 64, 128"),
        (["--calibration", "{plain}/none.txt"], "calibration text cannot be read from"),
        (["--calibration", "{plain}/model.safetensors"], "calibration text cannot be read from"),
        (["--calibration", "{plain}/config.json", "--length", "5000"], "one window takes 5000"),
    ],
)
def test_what_cannot_work_is_said_before_the_work(
    plain: Path,
    tmp_path: Path,
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = [argument.format(plain=plain) for argument in arguments]
    out = [] if "--out" in given else ["--out", tmp_path / "new"]
    assert run(plain, *out, *given) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_only_plain_models_with_a_tokenizer_are_opened(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(PageloomError, match="does not exist"):
        open_model(str(tmp_path / "nothing.gguf"))
    (plain / "tokenizer.json").unlink()
    with pytest.raises(PageloomError, match="has no tokenizer, which calibration text needs"):
        open_model(str(plain))
    content = json.loads((plain / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps(content | {"quantization_config": CODES}))
    with pytest.raises(PageloomError, match="is quantized already, with 'awq'"):
        open_model(str(plain))


def test_windows_are_spread_over_the_text(tokenizer: PreTrainedTokenizerFast) -> None:
    text = "".join(chr(33 + n) for n in range(90))
    assert cut_windows(tokenizer, text, 3, 10) == [
        list(range(start, start + 10)) for start in (0, 30, 60)
    ]
    assert len(cut_windows(tokenizer, text, 50, 20)) == 4
    with pytest.raises(PageloomError, match="has 90 tokens, but one window takes 91"):
        cut_windows(tokenizer, text, 1, 91)


def test_there_is_always_some_prose() -> None:
    assert len(calibration_text(None)) > 200_000


def test_groups_must_divide_all_inputs() -> None:
    linears = {"up": torch.nn.Linear(576, 64), "down": torch.nn.Linear(1536, 64)}
    check_sizes(linears, 64)
    with pytest.raises(PageloomError, match=r"up has 576 inputs.*128; --group-size 64 works"):
        check_sizes(linears, 128)
    with pytest.raises(PageloomError, match=r"odd has 48 inputs.*no group size works"):
        check_sizes({"odd": torch.nn.Linear(48, 64)}, 32)
    with pytest.raises(PageloomError, match="odd has 12 outputs, which cannot be packed"):
        check_sizes({"odd": torch.nn.Linear(64, 12)}, 32)
    with pytest.raises(PageloomError, match="--group-size is -1"):
        check_group_size(-1)


class Codes(torch.nn.Module):
    """What AutoAWQ puts in the place of a linear layer, with codes of no particular model."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        inputs, outputs = layer.in_features, layer.out_features
        words = torch.randint(-(2**31), 2**31, (inputs + inputs // 32, outputs // 8))
        self.register_buffer("qweight", words[:inputs].int())
        self.register_buffer("qzeros", words[inputs:].int())
        self.register_buffer("scales", torch.rand(inputs // 32, outputs).half())


def test_what_is_written_is_read_as_awq(plain: Path, tmp_path: Path) -> None:
    model = open_model(str(plain))
    for block in model.network.model.layers:
        for part in (block.self_attn, block.mlp):
            for name, layer in list(part.named_children()):
                if isinstance(layer, torch.nn.Linear):
                    setattr(part, name, Codes(layer))
    out = tmp_path / "new"
    out.mkdir()
    model.save(CODES, out)
    stored = load_file(out / "model.safetensors")
    assert "lm_head.weight" not in stored  # tied
    assert stored["model.norm.weight"].dtype == torch.bfloat16
    assert stored["model.layers.0.mlp.up_proj.scales"].dtype == torch.float16
    loader = open_loader(Plugins.load(), str(out))
    assert type(loader).METHOD == "awq"
    assert loader.model_config().dtype == torch.bfloat16
    assert loader.model_config().use_cache
    tokenizer = loader.tokenizer()
    assert tokenizer is not None
    assert tokenizer.encode("ab") == model.tokenizer.encode("ab")
    assert len(dict(loader.tensors())) == 2 + 2 * 9


@pytest.mark.skipif(not HAS_AUTOAWQ, reason="autoawq is not installed")
def test_a_quantized_model_is_near_the_plain_one_and_runs(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new"
    size = ["--group-size", 32, "--samples", 2, "--length", 64]
    assert run(plain, "--out", out, *size) == 0, capsys.readouterr().err
    assert "4-bit weights in groups of 32" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []

    before, after = weights_of(plain), weights_of(out)
    for name, weight in before.items():
        if match := re.fullmatch(r"(.*)\.(self_attn\.[qkv]|mlp\.(?:gate|up))_proj\.weight", name):
            norm = "input" if "attn" in match[2] else "post_attention"
            norm = f"{match[1]}.{norm}_layernorm.weight"
            # What the inputs were divided by, the weights were multiplied by; rows of `up` were
            # divided by what `down` was multiplied by.
            found = after[name] * (after[norm] / before[norm])
            found *= (weight.norm(dim=1) / found.norm(dim=1))[:, None]
            assert (found - weight).norm() < 0.2 * weight.norm(), name

    file = tmp_path / "engine.yaml"
    file.write_text(
        f"model: {{path: {out}, dtype: float32}}\nkv_cache: {{memory: 4MiB}}\n"
        "runtime: {device: cpu, num_threads: 1}\n"
    )
    (request,) = Engine.from_config(str(file)).generate([[5, 6, 7]], SamplingParams(max_tokens=4))
    assert len(request.outputs[0].token_ids) == 4


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    loader = open_loader(Plugins.load(), str(path))
    loader.model_config()
    return {name: tensor.float() for name, tensor in loader.tensors()}


@pytest.mark.skipif(not HAS_AUTOAWQ, reason="autoawq is not installed")
def test_the_faster_search_finds_the_clipping_that_autoawq_does() -> None:
    from awq.quantize.quantizer import AwqQuantizer

    from pageloom.quantize.search import CPUQuantizer

    torch.manual_seed(0)
    weight, inputs = torch.randn(64, 128), torch.randn(4, 32, 128) * torch.rand(128) * 3
    ours = object.__new__(CPUQuantizer)  # whose constructor wants a whole model
    ours.group_size, ours.zero_point, ours.w_bit = 32, True, 4
    found = ours._compute_best_clip(weight, inputs)
    assert torch.equal(found, AwqQuantizer._compute_best_clip(ours, weight, inputs))
    assert (found < weight.unflatten(1, (-1, 32)).abs().amax(-1, keepdim=True)).any()
