"""What distinguishes the members of the Llama family from each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pageloom.contract import LayerSpec
from pageloom.models.model import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

DECODER_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
LARGEST_SIZE = 2**31 - 1  # of any dimension


@dataclass(frozen=True, slots=True)
class DecoderArchitecture:
    """Sizes and switches of the decoder, read from a ``transformers`` configuration."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    norm_eps: float
    qkv_bias: bool
    output_bias: bool  # of the projection after attention
    mlp_bias: bool
    qk_norm: bool  # RMS norm over each head of q and k, before the rotation
    tied: bool  # the output layer is the embedding matrix
    windows: tuple[int | None, ...]  # per layer, tokens seen, itself included

    @classmethod
    def from_config(cls, config: PretrainedConfig) -> DecoderArchitecture:
        """Read a configuration for which `why_not` is None.

        A switch is read only for the types whose class in ``transformers`` reads it: checkpoints
        of others carry it without meaning it. Raises `UnsupportedModelError` for sizes that no
        model can have.
        """
        kind = config.model_type
        biased = kind in {"llama", "qwen3"} and config.attention_bias
        arch = cls(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_size=head_size(config),
            norm_eps=config.rms_norm_eps,
            qkv_bias=biased or kind == "qwen2",
            output_bias=biased,
            mlp_bias=kind == "llama" and config.mlp_bias,
            qk_norm=kind == "qwen3",
            tied=config.tie_word_embeddings,
            windows=_windows(config),
        )
        arch._check_sizes()
        return arch

    def layer_specs(self) -> tuple[LayerSpec, ...]:
        """The attention layers as the backend sees them."""
        return tuple(
            LayerSpec(
                self.num_heads, self.num_kv_heads, self.head_size, self.head_size**-0.5, window
            )
            for window in self.windows
        )

    def _check_sizes(self) -> None:
        sizes = {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": len(self.windows),
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_size,
            "sliding_window": min((w for w in self.windows if w is not None), default=1),
        }
        for name, size in sizes.items():
            if not 1 <= size <= LARGEST_SIZE:
                bound = "at least 1" if size < 1 else f"at most {LARGEST_SIZE}"
                raise UnsupportedModelError(
                    f"The configuration has {name} {size}, but it must be {bound}."
                )
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModelError(
                f"The configuration has {self.num_heads} attention heads, which cannot share "
                f"{self.num_kv_heads} key-value heads evenly."
            )


def why_not(config: PretrainedConfig) -> str | None:
    """None if the decoder computes this configuration, else what it does not know in it."""
    if config.model_type not in DECODER_TYPES:
        return f"model type {config.model_type}"
    if config.hidden_act != "silu":
        return f"activation {config.hidden_act}"
    rope = config.rope_parameters
    kind = rope.get("rope_type")  # absent when there is one set per layer type
    if kind != "default" and (kind not in ROPE_INIT_FUNCTIONS or kind == "proportional"):
        return f"rope type {kind}"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return "a partial rotary factor"
    others = set(getattr(config, "layer_types", None) or ())
    others -= {"full_attention", "sliding_attention"}
    return f"layer types {', '.join(sorted(others))}" if others else None


def head_size(config: PretrainedConfig) -> int:
    """Elements per head; explicit in the configuration or the hidden size shared out."""
    explicit: int | None = getattr(config, "head_dim", None)
    return explicit or config.hidden_size // config.num_attention_heads


def _windows(config: PretrainedConfig) -> tuple[int | None, ...]:
    window: int | None = getattr(config, "sliding_window", None)
    layers = range(config.num_hidden_layers)
    if config.model_type == "mistral":
        return (window,) * len(layers)
    if config.model_type == "llama":
        return (None,) * len(layers)
    kinds = config.layer_types
    return tuple(window if kinds[i] == "sliding_attention" else None for i in layers)
