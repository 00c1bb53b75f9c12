"""Tiny checkpoints with 4-bit linear layers, packed one code at a time as their formats say."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from pageloom.models.build import build_model
from pageloom.models.model import Attend
from reference import DenseAttention, InMemoryLoader, random_model

HIDDEN, FEED = 128, 256
LAYER = "model.layers.0.mlp.down_proj"
FILE = "model.safetensors"


@dataclass
class Coded:
    """A linear layer as integers: ``weight = (code - zero) * scale``."""

    codes: torch.Tensor  # [out, in], 0 to 15
    zeros: torch.Tensor  # [out, groups], 0 to 15
    scales: torch.Tensor  # [out, groups]

    @property
    def weight(self) -> torch.Tensor:
        """Float32 ``[out, in]``."""
        size = self.codes.shape[1] // self.scales.shape[1]
        zeros, scales = (t.float().repeat_interleave(size, 1) for t in (self.zeros, self.scales))
        return (self.codes - zeros) * scales


def coded(
    out_features: int,
    in_features: int,
    group_size: int,
    symmetric: bool = False,
    dtype: torch.dtype = torch.float16,
) -> Coded:
    """A random layer."""
    groups = 1 if group_size == -1 else in_features // group_size
    zeros = torch.randint(0, 16, (out_features, groups))
    return Coded(
        torch.randint(0, 16, (out_features, in_features)),
        torch.full_like(zeros, 8) if symmetric else zeros,
        (torch.rand(out_features, groups) * 0.02 + 0.001).to(dtype),
    )


def pack_words(codes: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Int32 ``[rows, columns / 8]``; ``order[n]`` says which of eight stands in nibble ``n``."""
    values = codes.numpy().astype(np.uint32)
    words = np.zeros((values.shape[0], values.shape[1] // 8), dtype=np.uint32)
    for column in range(values.shape[1] // 8):
        for nibble, which in enumerate(order):
            words[:, column] |= values[:, 8 * column + which] << np.uint32(4 * nibble)
    return torch.from_numpy(words.view(np.int32))


def tiny_config(kind: type[Any] = LlamaConfig, **changes: Any) -> Any:
    sizes = {"hidden_size": HIDDEN, "intermediate_size": FEED, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    tokens = {"vocab_size": 40, "eos_token_id": 2, "pad_token_id": 0}
    return kind(**sizes | heads | tokens | changes)


def write_checkpoint(
    folder: Path,
    config: Any,
    section: Mapping[str, Any],
    pack: Callable[[str, int, int], tuple[Coded, Mapping[str, torch.Tensor]]],
) -> dict[str, torch.Tensor]:
    """Write a random model whose linear layers, but for the last, are what ``pack`` makes of their
    name, outputs and inputs. Returns what its weights come to, in float32."""
    state = {k: v.detach().float() for k, v in random_model(config).state_dict().items()}
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        layer = name.removesuffix(".weight")
        if layer.endswith("_proj"):
            made, tensors = pack(layer, *tensor.shape)
            state[name] = made.weight
            stored.update({f"{layer}.{part}": t.contiguous() for part, t in tensors.items()})
        else:
            stored[name] = tensor.clone()
    save_file(stored, folder / FILE)
    content = config.to_dict() | {"quantization_config": dict(section)}
    (folder / "config.json").write_text(json.dumps(content, default=str))
    return state


def logits_of(loader: Any) -> torch.Tensor:
    """What a loader's model computes for a few tokens, in float32."""
    config = loader.model_config()
    model = build_model(
        loader, config, dtype=torch.float32, device=torch.device("cpu"), max_model_len=32
    )
    ids = torch.arange(3, 20)
    attend = DenseAttention(model.layers).step([(0, len(ids))])
    with torch.inference_mode():
        return model.logits(model.forward(ids, torch.arange(len(ids)), Attend(attend)))


def expected_logits(config: Any, state: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return logits_of(InMemoryLoader(config, state))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / FILE)
    change(tensors)
    save_file(tensors, folder / FILE)


def change_section(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads((folder / "config.json").read_text())
    change(content["quantization_config"])
    (folder / "config.json").write_text(json.dumps(content))
