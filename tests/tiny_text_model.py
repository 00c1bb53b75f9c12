"""The tiny model with a tokenizer, for tests that need text."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tiny_model import write_model

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_model(folder: Path, **changes: object) -> Path:
    """A random model with a tokenizer (a token per byte) and a chat template; the path of its
    configuration. Its greedy texts are gibberish, but always the same."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate([*SPECIAL, *letters])}
    backend = Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", additional_special_tokens=SPECIAL
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    write_model(
        folder,
        **{
            "vocab_size": len(vocab),
            "max_position_embeddings": 16384,
            "eos_token_id": vocab["<|im_end|>"],
            **changes,
        },
    )
    path = folder / "engine.yaml"
    path.write_text(
        f"model: {{path: {folder}, loader: dummy, dtype: float32, max_model_len: 1024,"
        " options: {initializer_range: 0.5}}\n"
        "kv_cache: {memory: 16MiB}\n"
        "runtime: {device: cpu, num_threads: 1, debug: true}\n"
        "server: {model_name: tiny}\n"
    )
    return path
