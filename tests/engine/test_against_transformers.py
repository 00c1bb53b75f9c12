"""The engine, from a saved model to its outputs, equals `transformers` on many architectures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest
import torch
import transformers as hf
from agreement import Reference, greedy_params
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from pageloom import Engine
from pageloom.contract import hookimpl
from pageloom.engine.outputs import RequestOutput
from reference import random_model

VOCAB, MAX_LEN, MAX_TOKENS = 96, 64, 16
TOLERANCE = 1e-4  # of a log-probability in float32; differences found are up to 2e-5

BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
    "initializer_range": 0.2,  # log-probabilities differ by units, so that a wrong one shows
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MULTI_HEAD = {key: value for key, value in BASE.items() if key != "num_key_value_heads"}
HEAD = {"head_dim": 16}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}

CONFIGS = {
    # In the engine's own decoder.
    "llama": lambda: hf.LlamaConfig(**BASE),
    "llama llama3": lambda: hf.LlamaConfig(**BASE, rope_parameters=LLAMA3),
    "mistral window": lambda: hf.MistralConfig(**BASE, sliding_window=7),
    "qwen2": lambda: hf.Qwen2Config(**BASE, tie_word_embeddings=True),
    "qwen2 window": lambda: hf.Qwen2Config(
        **BASE, **ALTERNATING, use_sliding_window=True, sliding_window=5
    ),
    "qwen3": lambda: hf.Qwen3Config(**BASE, head_dim=24),
    # In the modules of transformers, with the engine's attention.
    "gemma2": lambda: hf.Gemma2Config(
        # Tied, as its own head is, a random model repeats its last token for ever.
        **BASE,
        **HEAD,
        sliding_window=7,
        attn_logit_softcapping=5.0,
        tie_word_embeddings=False,
    ),
    "gemma3": lambda: hf.Gemma3TextConfig(**BASE, **HEAD, **ALTERNATING, sliding_window=7),
    "phi3": lambda: hf.Phi3Config(**BASE, sliding_window=9),
    "gpt2": lambda: hf.GPT2Config(**BASE, scale_attn_by_inverse_layer_idx=True),
    "gpt_neox": lambda: hf.GPTNeoXConfig(**MULTI_HEAD),
    "olmo2": lambda: hf.Olmo2Config(**BASE),
    "starcoder2": lambda: hf.Starcoder2Config(**BASE, sliding_window=8),
    "mixtral": lambda: hf.MixtralConfig(**BASE, **EXPERTS),
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(
        **BASE, **HEAD, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    ),
    "gpt_oss": lambda: hf.GptOssConfig(**BASE, **HEAD, **EXPERTS, sliding_window=6),
    "granite": lambda: hf.GraniteConfig(**BASE, attention_multiplier=0.3, residual_multiplier=0.5),
    "cohere": lambda: hf.CohereConfig(**BASE, logit_scale=0.5),
}

# Too little of everything: prompts are cut into chunks that share steps with decodes, and requests
# give way to others (a slab holds all that a request needs, so there they only wait).
SCARCE = {
    "cpu_paged": ["kv_cache.block_size=4", "kv_cache.num_blocks=20"],
    "torch_paged": ["kv_cache.block_size=4", "kv_cache.num_blocks=20"],
    "naive_contiguous": ["kv_cache.num_blocks=3"],
}
STEP_TOKENS = 8


def draw_prompts(lengths: Sequence[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]


# The last one reaches max_model_len with its output.
PROMPTS = draw_prompts([6, 1, 21, MAX_LEN - MAX_TOKENS])


@dataclass
class SavedModel:
    """A model of `transformers`, and the folder that it was saved to."""

    folder: Path
    reference: Reference

    def engine(self, backend: str) -> Engine:
        file = self.folder / "engine.yaml"
        file.write_text(
            f"model: {{path: {self.folder}, loader: hf, dtype: float32}}\n"
            f"scheduler: {{max_num_batched_tokens: {STEP_TOKENS}}}\n"
            f"attention: {{backend: {backend}}}\n"
            "runtime: {device: cpu, num_threads: 1, debug: true}\n"
        )
        return Engine.from_config(file, SCARCE[backend])

    @cached_property
    def greedy(self) -> list[list[int]]:
        return [self.reference.greedy(prompt, MAX_TOKENS) for prompt in PROMPTS]


def save(model: hf.PreTrainedModel, folder: Path, **options: str) -> SavedModel:
    model.save_pretrained(folder, **options)
    return SavedModel(folder, Reference(model))


@pytest.fixture(scope="module", params=CONFIGS)
def saved(request, tmp_path_factory) -> SavedModel:
    return save(random_model(CONFIGS[request.param]()), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=SCARCE)
def outputs(saved: SavedModel, request) -> list[RequestOutput]:
    return saved.engine(request.param).generate(PROMPTS, greedy_params(MAX_TOKENS))


def test_logprobs_at_every_position_are_those_of_one_forward(saved, outputs):
    for output in outputs:
        assert saved.reference.errors(output).max() < TOLERANCE


def test_greedy_tokens_are_those_of_generate(saved, outputs):
    assert [output.outputs[0].token_ids for output in outputs] == saved.greedy


def test_no_greedy_token_was_decided_by_rounding(saved):
    """Guards the test above, as does the next one."""
    for prompt, tokens in zip(PROMPTS, saved.greedy, strict=True):
        assert saved.reference.margin(prompt, tokens) > 10 * TOLERANCE


@pytest.mark.parametrize("backend", SCARCE)
def test_chunks_decodes_and_preemptions_did_mix(backend, tmp_path):
    class Steps:
        def __init__(self):
            self.records = []

        @hookimpl
        def step_finished(self, record):
            self.records.append(record)

    steps, engine = Steps(), save(random_model(CONFIGS["llama"]()), tmp_path).engine(backend)
    engine.plugins.register_observer(steps)
    engine.generate(PROMPTS, greedy_params(MAX_TOKENS))
    assert any(step.prefill_tokens > 1 and step.decode_tokens for step in steps.records)
    assert max(step.prefill_tokens for step in steps.records) <= STEP_TOKENS < len(PROMPTS[2])
    if backend != "naive_contiguous":
        assert sum(step.preempted for step in steps.records) > 0
    else:
        assert max(step.num_running for step in steps.records) == 3 < len(PROMPTS)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_shards_are_read_as_one_model(name, tmp_path):
    sharded = save(random_model(CONFIGS[name]()), tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    outputs = sharded.engine("torch_paged").generate(PROMPTS, greedy_params(MAX_TOKENS))
    assert [output.outputs[0].token_ids for output in outputs] == sharded.greedy
    for output in outputs:
        assert sharded.reference.errors(output).max() < TOLERANCE


def word_tokenizer() -> hf.PreTrainedTokenizerFast:
    """One token per word, after a beginning of sequence."""
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    words = [*special, *(f"▁w{n}" for n in range(VOCAB - len(special)))]
    backend = Tokenizer(
        models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
    )


def test_the_tokenizer_in_the_folder_reads_and_writes_text(tmp_path):
    saved, tokenizer = save(random_model(CONFIGS["llama"]()), tmp_path), word_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    texts = ["w3 w1 w4", "w59"]
    outputs = saved.engine("torch_paged").generate(texts, greedy_params(9))
    for text, output in zip(texts, outputs, strict=True):
        prompt = tokenizer(text).input_ids
        assert (output.prompt, output.prompt_token_ids) == (text, prompt)
        assert len(prompt) == 1 + len(text.split())
        tokens = saved.reference.greedy(prompt, 9)
        whole = tokenizer.decode([*prompt, *tokens], skip_special_tokens=True)
        assert text + output.outputs[0].text == whole
