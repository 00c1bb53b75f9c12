"""Which tensors a GGUF architecture has, their Hugging Face names, and how they were rewritten.

What llama.cpp's converter changed besides names, undone here: the rows of q and k of ``llama``
are interleaved for its rotary layout, and Gemma's norm weights carry the 1 that the model adds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from pageloom_quant.gguf.reader import GGUFFile

# GGUF module: (Hugging Face module, sizes of its weight). The sizes are those of `model_sizes`.
Modules = Mapping[str, tuple[str, str]]

TOP: Modules = {
    "token_embd": ("model.embed_tokens", "vocab hidden"),
    "output_norm": ("model.norm", "hidden"),
}
HEAD: Modules = {"output": ("lm_head", "vocab hidden")}
ATTENTION: Modules = {
    "attn_q": ("self_attn.q_proj", "q hidden"),
    "attn_k": ("self_attn.k_proj", "kv hidden"),
    "attn_v": ("self_attn.v_proj", "kv hidden"),
    "attn_output": ("self_attn.o_proj", "hidden q"),
}
GATED_MLP: Modules = {
    "ffn_gate": ("mlp.gate_proj", "ffn hidden"),
    "ffn_up": ("mlp.up_proj", "ffn hidden"),
    "ffn_down": ("mlp.down_proj", "hidden ffn"),
}
PRE_NORMS: Modules = {
    "attn_norm": ("input_layernorm", "hidden"),
    "ffn_norm": ("post_attention_layernorm", "hidden"),
}
HEAD_NORMS: Modules = {
    "attn_q_norm": ("self_attn.q_norm", "head"),
    "attn_k_norm": ("self_attn.k_norm", "head"),
}
SANDWICH_NORMS: Modules = {
    "attn_norm": ("input_layernorm", "hidden"),
    "post_attention_norm": ("post_attention_layernorm", "hidden"),
    "ffn_norm": ("pre_feedforward_layernorm", "hidden"),
    "post_ffw_norm": ("post_feedforward_layernorm", "hidden"),
}
LLAMA_LAYER = {**ATTENTION, **GATED_MLP, **PRE_NORMS}

QKV = ("attn_q", "attn_k", "attn_v")
LINEAR_ATTENTION = tuple(ATTENTION)


@dataclass(frozen=True)
class Architecture:
    """One value of ``general.architecture`` that can be loaded."""

    model_type: str  # of `transformers`
    layer: Modules
    biases: tuple[str, ...] = ()  # modules that always have one
    optional_biases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Modules that have a bias where the configuration field that is the key says so."""
    interleaved: bool = False  # rows of q and k
    norm_offset: bool = False  # norm weights are stored plus 1
    norm_eps: tuple[str, str] = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(
        "llama",
        LLAMA_LAYER,
        optional_biases={"attention_bias": LINEAR_ATTENTION, "mlp_bias": tuple(GATED_MLP)},
        interleaved=True,
    ),
    "qwen2": Architecture("qwen2", LLAMA_LAYER, biases=QKV),
    "qwen3": Architecture(
        "qwen3",
        {**LLAMA_LAYER, **HEAD_NORMS},
        optional_biases={"attention_bias": LINEAR_ATTENTION},
    ),
    "phi3": Architecture(
        "phi3",
        {
            "attn_qkv": ("self_attn.qkv_proj", "qkv hidden"),
            "attn_output": ("self_attn.o_proj", "hidden q"),
            "ffn_up": ("mlp.gate_up_proj", "2ffn hidden"),
            "ffn_down": ("mlp.down_proj", "hidden ffn"),
            **PRE_NORMS,
        },
    ),
    "gemma": Architecture("gemma", LLAMA_LAYER, norm_offset=True),
    "gemma2": Architecture(
        "gemma2", {**ATTENTION, **GATED_MLP, **SANDWICH_NORMS}, norm_offset=True
    ),
    "gemma3": Architecture(
        "gemma3_text",
        {**ATTENTION, **GATED_MLP, **SANDWICH_NORMS, **HEAD_NORMS},
        norm_offset=True,
    ),
    "starcoder2": Architecture(
        "starcoder2",
        {
            **ATTENTION,
            "ffn_up": ("mlp.c_fc", "ffn hidden"),
            "ffn_down": ("mlp.c_proj", "hidden ffn"),
            **PRE_NORMS,
        },
        biases=("output_norm", "attn_norm", "ffn_norm"),
        optional_biases={"use_bias": (*LINEAR_ATTENTION, "ffn_up", "ffn_down")},
        norm_eps=("attention.layer_norm_epsilon", "norm_epsilon"),
    ),
    "olmo2": Architecture(
        "olmo2",
        {
            **ATTENTION,
            **GATED_MLP,
            "attn_q_norm": ("self_attn.q_norm", "q"),
            "attn_k_norm": ("self_attn.k_norm", "kv"),
            "post_attention_norm": ("post_attention_layernorm", "hidden"),
            "post_ffw_norm": ("post_feedforward_layernorm", "hidden"),
        },
        optional_biases={"attention_bias": LINEAR_ATTENTION},
    ),
}

FREQUENCY_FACTORS = frozenset(
    {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
)
"""Tensors that become part of the configuration."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor that the model needs: where the file has it, and what it is there."""

    source: str  # GGUF name
    name: str  # Hugging Face name
    shape: tuple[int, ...]
    heads: int = 0  # its rows are interleaved within this many heads; 0 if they are not
    norm_offset: bool = False


def find_architecture(file: GGUFFile) -> Architecture:
    """What ``general.architecture`` names. Raises `ValueError` if it cannot be loaded."""
    name = file.require("general.architecture", str)
    if name not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise file.error(f"has architecture {name!r}, which cannot be loaded; these can: {known}")
    return ARCHITECTURES[name]


def find_biases(file: GGUFFile, architecture: Architecture) -> dict[str, bool]:
    """Whether the biases of each group in ``optional_biases`` are there."""
    return {
        flag: any(f"blk.0.{module}.bias" in file.tensors for module in modules)
        for flag, modules in architecture.optional_biases.items()
    }


def model_sizes(file: GGUFFile) -> dict[str, int]:
    """Elements along each kind of dimension, heads and layers, from the metadata."""
    prefix = file.require("general.architecture", str)
    hidden = file.positive(f"{prefix}.embedding_length")
    heads = file.positive(f"{prefix}.attention.head_count")
    kv_heads = file.get(f"{prefix}.attention.head_count_kv", int, heads)
    head = file.get(f"{prefix}.attention.key_length", int, hidden // heads)
    ffn = file.positive(f"{prefix}.feed_forward_length")
    if kv_heads < 1 or heads % kv_heads or head < 2 or head % 2:
        raise file.error(
            f"has {heads} query heads, {kv_heads} key/value heads and head size {head}: key/value "
            f"heads must divide query heads, and the head size must be even"
        )
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise file.error("has no tensor 'token_embd.weight'")
    layers = file.positive(f"{prefix}.block_count")
    if layers > len(file.tensors):  # before anything is made for each of them
        raise file.error(
            f"has {layers} blocks by its metadata but only {len(file.tensors)} tensors"
        )
    return {
        "layers": layers,
        "vocab": embedding.rows,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "head": head,
        "q": heads * head,
        "kv": kv_heads * head,
        "qkv": (heads + 2 * kv_heads) * head,
        "ffn": ffn,
        "2ffn": 2 * ffn,
    }


def tensor_slots(file: GGUFFile, architecture: Architecture) -> Iterator[Slot]:
    """Every tensor that the model needs, whether or not the file has it."""
    sizes = model_sizes(file)
    biased = set(architecture.biases)
    for flag, present in find_biases(file, architecture).items():
        if present:
            biased.update(architecture.optional_biases[flag])
    top = {**TOP, **HEAD} if "output.weight" in file.tensors else TOP
    yield from _slots("", "", top, architecture, sizes, biased)
    for layer in range(sizes["layers"]):
        yield from _slots(
            f"blk.{layer}.",
            f"model.layers.{layer}.",
            architecture.layer,
            architecture,
            sizes,
            biased,
        )


def check_tensors(file: GGUFFile, slots: Iterable[Slot]) -> None:
    """Raise `ValueError` for a tensor that is missing, misshapen or unknown."""
    unknown = set(file.tensors) - FREQUENCY_FACTORS
    for slot in slots:
        info = file.tensors.get(slot.source)
        if info is None:
            raise file.error(f"has no tensor {slot.source!r}")
        if info.shape != slot.shape:
            raise file.error(
                f"has shape {list(info.shape)} in tensor {slot.source!r}, where its metadata gives "
                f"{list(slot.shape)}"
            )
        unknown.discard(slot.source)
    if unknown:
        raise file.error(
            f"has tensor {min(unknown)!r}, which is unknown in architecture "
            f"{file.require('general.architecture', str)!r}"
        )


def _slots(
    source: str,
    target: str,
    modules: Modules,
    architecture: Architecture,
    sizes: Mapping[str, int],
    biased: set[str],
) -> Iterator[Slot]:
    for module, (name, dims) in modules.items():
        shape = tuple(sizes[dim] for dim in dims.split())
        heads = 0
        if architecture.interleaved and module in ("attn_q", "attn_k"):
            heads = sizes["heads" if module == "attn_q" else "kv_heads"]
        offset = architecture.norm_offset and module.endswith("norm")
        yield Slot(f"{source}{module}.weight", f"{target}{name}.weight", shape, heads, offset)
        if module in biased:
            yield Slot(f"{source}{module}.bias", f"{target}{name}.bias", shape[:1], heads)
