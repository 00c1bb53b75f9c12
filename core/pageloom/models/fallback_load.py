"""Putting a loader's tensors into the model class of ``transformers``."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM

from pageloom.contract import WeightLoader
from pageloom.models.model import UnsupportedModelError
from pageloom.models.slots import report_weights

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def model_on_meta(
    config: PretrainedConfig, attention: str, trust_remote_code: bool
) -> PreTrainedModel:
    """The model of ``config`` without memory for its weights.

    Raises `UnsupportedModelError` when ``transformers`` has no causal language model for it, or
    when its attention cannot be replaced by the registered ``attention``.
    """
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                copy.deepcopy(config),  # which is given the name of the attention
                attn_implementation=attention,
                trust_remote_code=trust_remote_code,
            )
            return model
    except KeyError as error:  # classes that choose from a table of their own
        if error.args != (attention,):
            raise
        raise UnsupportedModelError(
            f"{config.model_type} cannot be served: its attention in transformers cannot be "
            "replaced (it has no attention interface)."
        ) from None
    except ValueError as error:
        raise UnsupportedModelError(
            f"{config.model_type} cannot be served: {str(error).splitlines()[0]}"
        ) from error


def with_weights(
    blank: PreTrainedModel, loader: WeightLoader, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """A new model of the class of ``blank`` that holds the tensors of ``loader``.

    ``transformers`` renames, prefixes and merges checkpoint tensors (experts of a mixture, for
    instance), ties weights and computes buffers that are not stored, as in `from_pretrained`. The
    tensors are held once on the CPU; those that it merges are held twice for a while.

    Raises `UnsupportedModelError` that names what is missing, unexpected or misshapen.
    """
    # Some parts must stay in float32; their tensors are not rounded first.
    plans = (blank._keep_in_fp32_modules, blank._keep_in_fp32_modules_strict)
    kept = None if any(plans) else dtype
    state = {
        name: tensor.to("cpu", kept if tensor.is_floating_point() else None, copy=True)
        for name, tensor in loader.tensors()
    }
    loaded: Any = type(blank).from_pretrained(
        None,
        config=blank.config,
        state_dict=state,
        dtype=dtype,
        attn_implementation=blank.config._attn_implementation,
        ignore_mismatched_sizes=True,  # reported below together with the others
        output_loading_info=True,
    )
    model: PreTrainedModel = loaded[0]
    report: dict[str, Any] = loaded[1]
    report_weights(
        report["missing_keys"],
        report["unexpected_keys"],
        [
            f"{name} is {list(got)}, not {list(want)}"
            for name, got, want in report["mismatched_keys"]
        ],
    )
    weights: torch.nn.Module = model  # whose `to` is not overloaded
    weights.to(device).eval().requires_grad_(False)
    return model
