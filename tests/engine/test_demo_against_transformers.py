"""The demo model through the engine equals the same weights in `transformers`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from agreement import Reference, greedy_params, scored_tokens
from transformers import LlamaForCausalLM

from pageloom import Engine
from pageloom.config import load_config
from pageloom.plugins import Plugins

CONFIG = "configs/smollm2.yaml"
BACKENDS = ["cpu_paged", "torch_paged", "naive_contiguous"]
MAX_TOKENS = 24
TOLERANCE = 5e-4  # of a log-probability in float32; differences found are up to 6e-5

CHAT = [{"role": "user", "content": "What is the capital of France?"}]
# Indentation is left out: where a text begins with it, the model is so ill-conditioned that
# transformers differs from itself by 1e-3 between two implementations of attention.
LICENSE = " ".join(Path("LICENSE").read_text().split())
TEXTS = ["The capital of France is", "def fibonacci(n):\n", LICENSE[:1600]]


def gguf_loader():
    """A loader like the engine's own, at the start of its life."""
    loader = Plugins.load().get("weight_loader", "gguf")
    return loader(loader.Config(), load_config(CONFIG).model.path)


def load_reference(dtype: torch.dtype) -> Reference:
    loader = gguf_loader()
    config = loader.model_config()
    config.dtype = dtype
    model = LlamaForCausalLM._from_config(config, attn_implementation="eager")
    report = model.load_state_dict(dict(loader.tensors()), strict=False)
    assert report.unexpected_keys == []
    assert report.missing_keys == ["lm_head.weight"]  # which is the embedding
    return Reference(model)


@pytest.fixture(scope="module")
def tokenizer():
    return gguf_loader().tokenizer()


@pytest.fixture(scope="module")
def reference():
    return load_reference(torch.float32)


@pytest.fixture(scope="module")
def reference_bfloat16():
    return load_reference(torch.bfloat16)


@pytest.fixture(scope="module")
def prompts(tokenizer):
    """Token ids by the tokenizer alone."""
    chat = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]
    return [chat, *(tokenizer.encode(text) for text in TEXTS)]


@pytest.fixture(scope="module")
def greedy(reference, prompts):
    return [reference.greedy(prompt, MAX_TOKENS) for prompt in prompts]


def run(backend, dtype):
    """The outputs for all prompts together; the last takes several steps."""
    overrides = [
        f"attention.backend={backend}",
        f"model.dtype={dtype}",
        "model.max_model_len=512",
        "scheduler.max_num_batched_tokens=128",
        "kv_cache.memory=64MiB",
        "runtime.num_threads=1",
        "runtime.debug=true",
    ]
    engine = Engine.from_config(CONFIG, overrides)
    return engine.generate([engine.render_chat(CHAT), *TEXTS], greedy_params(MAX_TOKENS))


@pytest.fixture(scope="module", params=BACKENDS)
def outputs(request):
    return run(request.param, "float32")


def test_prompts_are_tokenized_alike(outputs, prompts):
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert len(prompts[-1]) > 300


def test_logprobs_at_every_position_are_those_of_one_forward(outputs, reference):
    for output in outputs:
        assert reference.errors(output).max() < TOLERANCE


def test_greedy_tokens_and_text_are_those_of_generate(outputs, greedy, tokenizer):
    assert [output.outputs[0].token_ids for output in outputs] == greedy
    texts = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in greedy]
    assert [output.outputs[0].text for output in outputs] == texts
    assert "Paris" in texts[0]


def test_no_greedy_token_was_decided_by_rounding(reference, prompts, greedy):
    """Guards the test above."""
    for prompt, tokens in zip(prompts, greedy, strict=True):
        assert reference.margin(prompt, tokens) > 10 * TOLERANCE


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_is_no_further_from_float32_than_transformers_is(
    backend, reference, reference_bfloat16
):
    ours, theirs = [], []
    for output in run(backend, "bfloat16"):
        token_ids, entries = scored_tokens(output)
        exact = reference.scores(token_ids)
        ours.append(torch.tensor([entry.logprob for entry in entries]) - exact)
        theirs.append(reference_bfloat16.scores(token_ids) - exact)
    ours, theirs = torch.cat(ours), torch.cat(theirs)
    assert ours.abs().mean() < 0.1  # logits near 16 are 1/16 apart
    assert ours.square().mean() < 1.5 * theirs.square().mean()
