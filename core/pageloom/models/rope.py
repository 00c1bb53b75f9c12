"""Rotary frequencies as ``transformers`` defines them, fixed for the life of an engine.

Two variants depend on the length of the sequence: ``dynamic`` stretches the base as a sequence
grows beyond the trained length, and ``longrope`` changes its factors there. ``transformers``
decides by the longest sequence of the call, so the result for one request would depend on the
others in the batch, and cached keys would disagree with later ones. Here both are decided once,
by ``max_model_len``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pageloom.models.architecture import head_size

if TYPE_CHECKING:
    from transformers import PretrainedConfig

LENGTH_DEPENDENT = frozenset({"dynamic", "longrope"})


def rotary_frequencies(config: PretrainedConfig, max_model_len: int) -> tuple[torch.Tensor, float]:
    """Inverse frequencies, float32 ``[head_size / 2]``, and the factor on cosines and sines.

    For configurations with one set of rotary parameters for all layers and whole heads rotated.
    """
    parameters = config.rope_parameters
    kind = parameters["rope_type"]
    if kind == "default":
        size = head_size(config)
        exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
        return 1.0 / parameters["rope_theta"] ** exponents, 1.0
    return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=max_model_len)


def fix_length_dependent(model: torch.nn.Module, max_model_len: int) -> None:
    """Decide the length-dependent frequencies inside a ``transformers`` model by max_model_len."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str) and kinds in LENGTH_DEPENDENT:
            scaling = _fix(module, kinds, None, max_model_len)
            module.attention_scaling = scaling  # type: ignore[assignment]
            # What its forward tests before it updates the buffers.
            module.rope_type = "default"  # type: ignore[assignment]
        elif isinstance(kinds, dict):
            for layer_type, kind in kinds.items():
                if kind in LENGTH_DEPENDENT:
                    scaling = _fix(module, kind, layer_type, max_model_len)
                    setattr(module, f"{layer_type}_attention_scaling", scaling)
                    kinds[layer_type] = "default"


def _fix(module: torch.nn.Module, kind: str, layer_type: str | None, max_model_len: int) -> float:
    buffer = getattr(module, "inv_freq" if layer_type is None else f"{layer_type}_inv_freq")
    inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](
        module.config, buffer.device, seq_len=max_model_len, layer_type=layer_type
    )
    buffer.copy_(inv_freq)
    return scaling
