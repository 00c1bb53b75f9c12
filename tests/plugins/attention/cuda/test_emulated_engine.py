"""The CUDA kernels under a whole engine, in the emulator."""

from __future__ import annotations

import pytest
import torch
from emulation import EmulatedCUDAPaged

from pageloom import SamplingParams
from pageloom.config import load_config
from pageloom.contract import native
from pageloom.engine.assemble import assemble
from pageloom.plugins import Plugins
from pageloom_attention.cuda_paged import backend
from tiny_model import write_model

pytestmark = pytest.mark.skipif(native.find_compiler() is None, reason="there is no C++ compiler")

# Longer than a block, and two that begin alike.
PROMPTS = [list(range(1, 38)), [5, 6, 7], [*range(1, 21), 50, 51], list(range(40, 60))]


@pytest.fixture
def answers(tmp_path, monkeypatch):
    """What engines of a tiny model answer to `PROMPTS`: with cuda_paged, and with torch_paged."""
    monkeypatch.setattr(backend, "CUDAPaged", EmulatedCUDAPaged)
    write_model(tmp_path, hidden_size=96)  # whose heads have 16 elements
    path = tmp_path / "engine.yaml"
    path.write_text(
        f"model: {{path: {tmp_path}, loader: dummy, options: {{initializer_range: 0.2}}}}\n"
        "scheduler: {max_num_seqs: 3, max_num_batched_tokens: 24}\n"  # in chunks, beside decodes
        "runtime: {device: cpu, num_threads: 1, debug: true}\n"
    )
    plugins = Plugins.load()

    def answer(name, dtype, quantizer, params):
        given = [f"attention.backend={name}", f"model.dtype={dtype}"]
        given += [f"kv_cache.quantizer={quantizer}"] if quantizer else []
        engine = assemble(load_config(path, given, plugins))
        return engine.generate(PROMPTS, params)

    def answers(*args, **params):
        params = SamplingParams(temperature=0, ignore_eos=True, **params)
        return [answer(name, *args, params) for name in ("cuda_paged", "torch_paged")]

    return answers


@pytest.mark.parametrize("quantizer", [None, "fp8_e4m3", "fp8_e5m2_token_head", "int8", "int4"])
def test_greedy_output_is_that_of_torch_paged(answers, quantizer):
    for one, other in zip(*answers("float32", quantizer, max_tokens=20), strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids


@pytest.mark.parametrize("quantizer", [None, "fp8_e4m3_token_head"])
def test_in_bfloat16_logits_are_near_those_of_torch_paged(answers, quantizer):
    """They are off by the roundings of bfloat16 in two layers, on a scale of two."""
    ours, theirs = (
        torch.tensor([entry.logprob for output in given for entry in output.prompt_logprobs[1:]])
        for given in answers("bfloat16", quantizer, max_tokens=1, prompt_logprobs=0)
    )
    assert ours.std() > 1
    assert (ours - theirs).abs().mean() < 0.05
    assert (ours - theirs).abs().max() < 0.3
