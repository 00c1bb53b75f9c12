"""From GGUF metadata to a configuration of `transformers`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gguf import TokenType
from transformers import AutoConfig

from pageloom_quant.gguf.architectures import (
    Architecture,
    find_architecture,
    find_biases,
    model_sizes,
)
from pageloom_quant.gguf.reader import GGUFFile
from pageloom_quant.gguf.rope import rope_parameters

if TYPE_CHECKING:
    from transformers import PretrainedConfig

END_KEYS = ("eos", "eot", "eom")
END_TEXTS = frozenset(
    {
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|end_of_text|>",
    }
)
"""Control tokens that end a turn. Converters often write only one of them as eos."""

# llama.cpp tells the 27B models by their depth: they scale queries by hidden size / heads.
GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
GEMMA3_PATTERN = 6  # every sixth layer attends globally
GEMMA3_LOCAL_FREQ_BASE = 10000.0


def model_config(file: GGUFFile) -> PretrainedConfig:
    """The configuration of the model in ``file``.

    Raises `ValueError` for an architecture that is not supported, for a feature of it that is
    not, and for metadata that is missing or makes no sense.
    """
    architecture = find_architecture(file)
    prefix = file.require("general.architecture", str)
    _refuse_unsupported(file, prefix)
    sizes = model_sizes(file)
    tokens = len(file.get("tokenizer.ggml.tokens", list, []))
    if tokens > sizes["vocab"]:
        raise file.error(f"has {tokens} tokens but only {sizes['vocab']} embeddings")
    eps_key, eps_field = architecture.norm_eps
    ends = end_token_ids(file)
    fields: dict[str, Any] = {
        "vocab_size": sizes["vocab"],
        "hidden_size": sizes["hidden"],
        "intermediate_size": sizes["ffn"],
        "num_hidden_layers": sizes["layers"],
        "num_attention_heads": sizes["heads"],
        "num_key_value_heads": sizes["kv_heads"],
        "head_dim": sizes["head"],
        "max_position_embeddings": file.positive(f"{prefix}.context_length"),
        eps_field: file.factor(f"{prefix}.{eps_key}"),
        "rope_parameters": rope_parameters(file, sizes["head"]),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": _token_id(file, "bos"),
        "eos_token_id": ends or None,
        "pad_token_id": _token_id(file, "padding"),
        **find_biases(file, architecture),
    }
    model_type, special = _special_fields(file, architecture, sizes)
    fields.update(special)
    try:
        return AutoConfig.for_model(model_type, **fields)
    except Exception as error:  # the strict configuration classes raise types of their own
        raise file.error(
            f"has metadata that makes no {model_type} configuration: {error}"
        ) from error


def end_token_ids(file: GGUFFile) -> list[int]:
    """Every token id that ends a generation, the file's eos first."""
    ids = [_token_id(file, key) for key in END_KEYS]
    tokens = file.get("tokenizer.ggml.tokens", list, [])
    types = file.get("tokenizer.ggml.token_type", list, [])
    ids += [
        index
        for index, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if kind == TokenType.CONTROL and token in END_TEXTS
    ]
    return list(dict.fromkeys(index for index in ids if index is not None))


def _special_fields(
    file: GGUFFile, architecture: Architecture, sizes: Mapping[str, int]
) -> tuple[str, dict[str, Any]]:
    """The ``model_type``, and what only this architecture has."""
    name = file.require("general.architecture", str)
    window = file.get(f"{name}.attention.sliding_window", int, 0) or None
    if name == "llama" and window:
        if any(find_biases(file, architecture).values()):
            raise file.error("has a sliding window and biases, which no known model has together")
        return "mistral", {"sliding_window": window}
    if name == "phi3":
        scaled = "phi3.rope.scaling.original_context_length"
        key = scaled if scaled in file.metadata else "phi3.context_length"
        return architecture.model_type, {
            "sliding_window": window,
            "original_max_position_embeddings": file.positive(key),
        }
    if name in ("gemma2", "gemma3"):
        per_head = sizes["hidden"] // sizes["heads"]
        large = sizes["layers"] == GEMMA_27B_LAYERS[name]
        fields: dict[str, Any] = {
            "sliding_window": file.positive(f"{name}.attention.sliding_window"),
            "query_pre_attn_scalar": per_head if large else sizes["head"],
        }
        if name == "gemma2":
            for field in ("attn_logit_softcapping", "final_logit_softcapping"):
                fields[field] = file.factor(f"{name}.{field}")
        else:
            fields["layer_types"] = _gemma3_layers(file, sizes["layers"])
            fields["rope_parameters"] = _gemma3_rope(file, sizes["head"])
        return architecture.model_type, fields
    if window:
        raise file.error(f"has a sliding window, which {name} models do not")
    return architecture.model_type, {}


def _gemma3_layers(file: GGUFFile, layers: int) -> list[str]:
    key = "gemma3.attention.sliding_window_pattern"
    period = file.positive(key) if key in file.metadata else GEMMA3_PATTERN
    return [
        "full_attention" if (layer + 1) % period == 0 else "sliding_attention"
        for layer in range(layers)
    ]


def _gemma3_rope(file: GGUFFile, head: int) -> dict[str, Any]:
    local = file.factor("gemma3.rope.freq_base_swa", GEMMA3_LOCAL_FREQ_BASE)
    return {
        "full_attention": rope_parameters(file, head),
        "sliding_attention": {"rope_type": "default", "rope_theta": local},
    }


def _refuse_unsupported(file: GGUFFile, prefix: str) -> None:
    parts = file.get("split.count", int, 0)
    if parts > 1:
        raise file.error(f"is one of {parts} parts; join them with 'llama-gguf-split --merge'")
    if file.get(f"{prefix}.expert_count", int, 0) > 0:
        raise file.error(f"is a mixture-of-experts model of architecture {prefix!r}, not supported")
    value = file.get(f"{prefix}.attention.value_length", int, 0)
    key = file.get(f"{prefix}.attention.key_length", int, value)
    if value and value != key:
        raise file.error(f"has keys of length {key} and values of length {value}, not supported")


def _token_id(file: GGUFFile, name: str) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    if key not in file.metadata:
        return None
    index = file.require(key, int)
    tokens = file.get("tokenizer.ggml.tokens", list, [])
    if tokens and not 0 <= index < len(tokens):
        raise file.error(f"has {index} in metadata key {key!r}, outside its {len(tokens)} tokens")
    return index
