"""Write GGUF files from Hugging Face models, the way llama.cpp's converter does.

Names come from the tables of `gguf`, so they are an independent check of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

VOCAB = 96


def tiny_model(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A model with random weights, none of them (norms, biases) at its neutral value."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(torch.randn_like(tensor) * 0.1)
    return model


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k in the order of llama.cpp's rotary embedding."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    architecture: str,
    keys: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
    change: Callable[[str, np.ndarray], np.ndarray | None] = lambda name, array: array,
    kind: Callable[[str], gguf.GGMLQuantizationType | None] = lambda name: None,
) -> Path:
    """Write ``model`` under ``architecture``. ``keys`` are added metadata (None removes a key),
    ``extra`` are added tensors, ``change`` may replace or drop tensors by their GGUF name, ``kind``
    says which matrices are quantized and how."""
    config = model.config
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    eps = getattr(config, "rms_norm_eps", None)
    norm = ("rms_", eps) if eps is not None else ("", config.norm_epsilon)
    metadata: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": head,
        "attention.value_length": head,
        f"attention.layer_norm_{norm[0]}epsilon": norm[1],
        "rope.dimension_count": head,
    }
    metadata = {f"{architecture}.{key}": value for key, value in metadata.items()}
    metadata |= keys or {}
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        add_key(writer, key, value)
    names = gguf.get_tensor_name_map(
        {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}[architecture],
        config.num_hidden_layers,
    )
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.float().numpy()
        if architecture == "llama" and ".q_proj." in name:
            array = interleave(array, heads)
        if architecture == "llama" and ".k_proj." in name:
            array = interleave(array, kv_heads)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            array = array + 1
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        changed = change(target, array)
        if changed is None:
            continue
        changed = np.ascontiguousarray(changed)
        chosen = kind(target) if changed.ndim == 2 else None
        if chosen is None:
            writer.add_tensor(target, changed)
        else:
            writer.add_tensor(target, gguf.quantize(changed, chosen), raw_dtype=chosen)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Add a metadata key with the type that llama.cpp writes for such a value."""
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
