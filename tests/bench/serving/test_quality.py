"""Perplexity and divergence are the model's own, however the engine serves it."""

from __future__ import annotations

import json
import math
import string

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from pageloom import Engine
from pageloom.bench.serving.quality import (
    PerplexityRatio,
    Sample,
    kl_divergence,
    measure_quality,
    perplexity,
)
from pageloom.cli import main
from pageloom.errors import PageloomError
from pageloom.models.dummy import DummyLoader
from pageloom.scheduling import SamplingParams
from tiny_model import MAX_MODEL_LEN, VOCAB, write_model

LETTERS = " " + string.ascii_letters
BOS = VOCAB - 1
TEXT = "Paged attention keeps the keys and values of a sequence in blocks that need not be adjacent"
SPREAD = 0.5


def write_tokenizer(folder, alphabet=LETTERS, *, bos=False):
    """A token per letter."""
    letters = {letter: n for n, letter in enumerate(alphabet, 1)}
    tokenizer = Tokenizer(models.WordLevel({"?": 0, **letters, "<s>": BOS}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", BOS)]
        )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>").save_pretrained(folder)


@pytest.fixture(scope="module")
def write(tmp_path_factory):
    """Write a configuration of the random model, with a tokenizer, and return its path."""

    def write(*, tokenizer=None, model=None, **options):
        folder = tmp_path_factory.mktemp("quality")
        write_model(folder, **model or {})
        if tokenizer is not None:
            write_tokenizer(folder, **tokenizer)
        base = {
            "model": {
                "path": str(folder),
                "loader": "dummy",
                "dtype": "float32",
                "options": {"initializer_range": SPREAD},
            },
            "attention": {"backend": "torch_paged"},
            "kv_cache": {"block_size": 4, "num_blocks": 32, "swap_space": None},
            "runtime": {"device": "cpu", "num_threads": 1, "debug": True},
        }
        for section, values in options.items():
            base[section] = base.get(section, {}) | values
        path = folder / "engine.yaml"
        path.write_text(json.dumps(base))
        return str(path)

    return write


@pytest.fixture(scope="module")
def plain(write):
    return write(tokenizer={})


def log_probs(path, windows):
    """Of every window, as `transformers` computes them: ``[len(window) - 1, VOCAB]`` each."""
    loader = DummyLoader(DummyLoader.Config(initializer_range=SPREAD), path)
    model = AutoModelForCausalLM.from_config(loader.model_config()).eval()
    model.load_state_dict(dict(loader.tensors()), strict=False)
    with torch.no_grad():
        return [model(torch.tensor([w])).logits[0, :-1].log_softmax(1) for w in windows]


def expected_perplexity(path, windows):
    losses = [
        F.nll_loss(scores, torch.tensor(window[1:]), reduction="none")
        for scores, window in zip(log_probs(path, windows), windows, strict=True)
    ]
    return math.exp(torch.cat(losses).mean())


def folder_of(path):
    return path.removesuffix("/engine.yaml")


TOKENS = [1 + LETTERS.index(letter) for letter in TEXT]


def test_perplexity_is_that_of_the_model_over_windows(plain):
    longest = MAX_MODEL_LEN - 1
    windows = [TOKENS[:longest], TOKENS[longest:]]
    expected = expected_perplexity(folder_of(plain), windows)
    assert perplexity(plain, sample=Sample("text", TEXT)) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("most", [2, 20, 64])  # the last leaves one token over, which has no window
def test_as_many_tokens_are_taken_as_asked_for(plain, most):
    engines = {"plain": Engine.from_config(plain)}
    quality = measure_quality(engines, Sample("text", TEXT, most))
    windows = [TOKENS[: min(most, MAX_MODEL_LEN - 1)]]
    assert quality.scored_tokens == len(windows[0]) - 1
    assert quality.perplexity["plain"] == pytest.approx(
        expected_perplexity(folder_of(plain), windows), rel=1e-4
    )


def test_every_window_begins_with_what_the_tokenizer_puts_before_a_text(write):
    path = write(tokenizer={"bos": True})
    step = MAX_MODEL_LEN - 2
    windows = [[BOS, *TOKENS[:step]], [BOS, *TOKENS[step:]]]
    quality = measure_quality({"bos": Engine.from_config(path)}, Sample("text", TEXT))
    assert quality.scored_tokens == len(TOKENS)
    expected = expected_perplexity(folder_of(path), windows)
    assert quality.perplexity["bos"] == pytest.approx(expected, rel=1e-4)


def test_how_the_engine_serves_the_text_changes_nothing(write, plain):
    chunked = {"scheduler": {"max_num_batched_tokens": 7, "max_num_seqs": 4}}
    engines = {
        "plain": Engine.from_config(plain),
        "chunked": Engine.from_config(write(tokenizer={}, **chunked)),
        "contiguous": Engine.from_config(
            write(
                tokenizer={},
                attention={"backend": "naive_contiguous"},
                kv_cache={"block_size": None, "num_blocks": 2},
            )
        ),
    }
    quality = measure_quality(engines, Sample("text", TEXT))
    for name in ("chunked", "contiguous"):
        assert quality.perplexity[name] == pytest.approx(quality.perplexity["plain"], rel=1e-4)
        assert abs(quality.kl_divergence[name]) < 1e-5


def test_a_configuration_does_not_diverge_from_itself(write):
    path = write(tokenizer={}, model={"vocab_size": VOCAB})
    engines = {name: Engine.from_config(path, ["model.dtype=bfloat16"]) for name in "ab"}
    quality = measure_quality(engines, Sample("text", TEXT))
    assert quality.kl_divergence == {"a": 0, "b": 0}
    assert quality.perplexity["a"] == quality.perplexity["b"]


def test_coarser_caches_diverge_more(plain):
    formats = (None, "fp8_e4m3_token_head", "int4_token_head")
    engines = {
        str(name): Engine.from_config(plain, [f"kv_cache.quantizer={name or 'null'}"])
        for name in formats
    }
    divergences = measure_quality(engines, Sample("text", TEXT)).kl_divergence
    assert divergences["None"] == 0
    assert 1e-5 < divergences["fp8_e4m3_token_head"] < divergences["int4_token_head"] / 2


def test_divergence_is_the_mean_over_positions_from_the_baseline(write, plain):
    """The other model has other weights."""
    other = write(
        tokenizer={},
        model={"max_position_embeddings": MAX_MODEL_LEN, "rope_parameters": {
            "rope_type": "default", "rope_theta": 3.0,
        }},
    )  # fmt: skip
    engines = {"plain": Engine.from_config(plain), "other": Engine.from_config(other)}
    quality = measure_quality(engines, Sample("text", TEXT, 40))
    (mine,), (theirs,) = (log_probs(folder_of(p), [TOKENS[:40]]) for p in (plain, other))
    expected = (mine.exp() * (mine - theirs)).sum(1).mean()
    assert expected > 0.1
    assert quality.kl_divergence["other"] == pytest.approx(float(expected), rel=1e-3)


def test_divergence_of_impossible_tokens():
    certain = torch.tensor([[0.0, -math.inf]])
    even = torch.tensor([[0.5, 0.5]]).log()
    assert kl_divergence(certain, certain) == 0
    assert kl_divergence(certain, even) == pytest.approx(math.log(2))
    assert kl_divergence(even, certain) == math.inf


def test_the_interval_holds_the_true_ratio_as_often_as_it_says():
    random = torch.Generator().manual_seed(0)
    held = 0
    for _ in range(400):
        baseline = torch.rand(100, generator=random, dtype=torch.float64) * 9
        noise = torch.randn(100, generator=random, dtype=torch.float64)
        ratio = PerplexityRatio.of(baseline + 0.1 + 0.2 * noise, baseline)
        held += ratio.low <= math.exp(0.1) <= ratio.high
    assert 0.92 < held / 400 < 0.98


def test_the_engine_serves_on_as_before(plain):
    params = SamplingParams(temperature=0, max_tokens=4)
    engine = Engine.from_config(plain)
    before = engine.generate(TOKENS[:20], params)
    measured = [measure_quality({"a": engine}, Sample("text", TEXT)) for _ in range(2)]
    assert measured[0] == measured[1]
    assert engine.planner.pool.num_used == 0
    after = engine.generate(TOKENS[:20], params)
    assert [o.token_ids for o in before[0].outputs] == [o.token_ids for o in after[0].outputs]


def test_an_engine_at_work_is_not_measured(plain):
    engine = Engine.from_config(plain)
    engine.add_request(TOKENS[:4])
    with pytest.raises(ValueError, match="busy has open requests"):
        measure_quality({"busy": engine}, Sample("text", TEXT))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "b has no tokenizer, and quality is measured on a text; set model.tokenizer"),
        ({"tokenizer": {"alphabet": LETTERS[::-1]}}, "b and a make different tokens of text"),
        ({"tokenizer": {}, "model": {"vocab_size": 128}}, "b predicts 128 tokens and a 96"),
        (
            {"tokenizer": {}, "kv_cache": {"num_blocks": 3}},
            "b cannot score 63 tokens: .*the pool has 3",
        ),
    ],
)
def test_what_cannot_be_compared_is_one_clear_error(write, plain, options, message):
    engines = {"a": Engine.from_config(plain), "b": Engine.from_config(write(**options))}
    with pytest.raises(PageloomError, match=message):
        measure_quality(engines, Sample("text", TEXT))


def test_a_model_that_yields_no_numbers_is_reported(plain, monkeypatch):
    engine = Engine.from_config(plain)
    logits = engine.runner.model.logits
    monkeypatch.setattr(engine.runner.model, "logits", lambda hidden: logits(hidden) * math.nan)
    with pytest.raises(PageloomError, match="a cannot score the text: the model's logits hold NaN"):
        measure_quality({"a": engine}, Sample("text", TEXT))
    assert not engine.has_requests


def test_a_text_of_one_token_has_nothing_to_score(plain):
    with pytest.raises(PageloomError, match="text gives nothing to score"):
        measure_quality({"a": Engine.from_config(plain)}, Sample("text", "x"))


def test_the_command_shows_quality_beside_speed(plain, write, tmp_path, capsys):
    coarse = write(tokenizer={}, kv_cache={"quantizer": "int4_token_head"})
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    out, table = tmp_path / "run.json", tmp_path / "run.md"
    command = [
        "bench", "engine", plain, coarse, "--text", str(text), "--quality-tokens", "60",
        "--requests", "2", "--rounds", "1", "--prompt-tokens", "4:5", "--output-tokens", "2:3",
        "--json", str(out), "--markdown", str(table),
    ]  # fmt: skip
    with pytest.raises(SystemExit) as caught:
        main(command)
    assert caught.value.code == 0
    run = json.loads(out.read_text())
    quality = run["quality"]
    assert (quality["source"], quality["scored_tokens"], quality["window"]) == (str(text), 59, 60)
    first, second = quality["perplexity"]
    rows = [line.split("|")[1:-1] for line in table.read_text().splitlines() if line[:1] == "|"]
    shown = {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows}
    mine, theirs = quality["perplexity"].values()
    ratio = quality["perplexity_ratio"][second]
    assert ratio["low"] < ratio["value"] < ratio["high"]
    assert ratio["value"] == pytest.approx(theirs / mine)
    assert shown["perplexity"] == [
        f"{mine:.3f}", f"{theirs:.3f}",
        f"{theirs / mine:.4f} [{ratio['low']:.4f}, {ratio['high']:.4f}]",
    ]  # fmt: skip
    assert quality["kl_divergence"][first] == 0
    assert shown["KL from baseline, nats/token"] == [
        "", f"{quality['kl_divergence'][second]:.5f}", ""
    ]  # fmt: skip
    assert quality["kl_divergence"][second] > 0
    assert run["configs"][second]["memory"]["kv_format"] == "int4_token_head"
    assert f"59 tokens of {text} were scored, in windows of up to 60" in table.read_text()
    shown_as_it_starts = capsys.readouterr().err
    assert f"{first}: memory of cpu: weights" in shown_as_it_starts
    assert "KV cache: " in shown_as_it_starts


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--quality-tokens", "9"], "--quality-tokens needs --quality, or --text with a file"),
        (["--text", "/nowhere.txt"], "the text /nowhere.txt cannot be read"),
    ],
)
def test_options_that_make_no_sense(plain, capsys, arguments, message):
    with pytest.raises(SystemExit) as caught:
        main(["bench", "engine", plain, *arguments])
    assert caught.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_the_default_text_is_prose():
    sample = Sample.load(None)
    assert sample.source == "pydoc_data.topics"
    assert "Assert statements are a convenient way" in sample.text
    assert len(sample.text) > 100_000
