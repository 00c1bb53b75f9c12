"""Putting a loader's tensors into the model class of ``transformers``."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM

from pageloom.contract import WeightLoader
from pageloom.errors import one_line
from pageloom.models.model import UnsupportedModelError
from pageloom.models.slots import WEIGHT_DTYPES, describe_dtype, report_weights

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
    except Exception as error:  # model classes raise of their own what a configuration provokes
        raise UnsupportedModelError(
            f"{config.model_type} cannot be served: {_why_not_built(config, attention, error)}"
        ) from error


def with_weights(
    blank: PreTrainedModel, loader: WeightLoader, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """A new model of the class of ``blank`` that holds the tensors of ``loader``.

    ``transformers`` renames, prefixes and merges checkpoint tensors (experts of a mixture, for
    instance), ties weights and computes buffers that are not stored, as in `from_pretrained`. The
    tensors are held once on the CPU; those that it merges are held twice for a while.

    Raises `UnsupportedModelError` that names what is missing, unexpected, misshapen or of a dtype
    that is no plain floating point.
    """
    own = blank.state_dict()
    # Some parts must stay in float32; their tensors are not rounded first.
    plans = (blank._keep_in_fp32_modules, blank._keep_in_fp32_modules_strict)
    kept = None if any(plans) else dtype
    state: dict[str, torch.Tensor] = {}
    mistyped: list[str] = []
    for name, tensor in loader.tensors():
        if tensor.dtype in WEIGHT_DTYPES:
            state[name] = tensor.to("cpu", kept, copy=True)
        elif _is_no_weight(name, tensor, blank, own):
            state[name] = tensor.to("cpu", copy=True)
        else:
            mistyped.append(describe_dtype(name, tensor))
    report_weights([], [], [], mistyped)
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
        [],
    )
    weights: torch.nn.Module = model  # whose `to` is not overloaded
    weights.to(device).eval().requires_grad_(False)
    return model


def _is_no_weight(
    name: str, tensor: torch.Tensor, blank: PreTrainedModel, own: Mapping[str, torch.Tensor]
) -> bool:
    """Whether a tensor that is no plain floating point may come: as a buffer of its own dtype, or
    as one of old checkpoints that ``transformers`` drops (GPT-2's causal masks)."""
    target = own.get(name, own.get(f"{blank.base_model_prefix}.{name}"))
    if target is not None:
        return target.dtype == tensor.dtype
    dropped = blank._keys_to_ignore_on_load_unexpected
    return any(re.search(pattern, name) for pattern in dropped or ())


def _why_not_built(config: PretrainedConfig, attention: str, error: Exception) -> str:
    if isinstance(error, ValueError):
        return str(error).partition("\n")[0]
    if not isinstance(error, KeyError):
        return f"transformers cannot build it from its configuration ({one_line(error)})."
    # Classes choose their activation and rotary function from tables, without a message.
    if error.args == (attention,):
        return "its attention in transformers cannot be replaced (it has no attention interface)."
    unknown = error.args[0] if error.args else ""
    keys = ", ".join(_keys_of(config.to_dict(), unknown))
    where = f"as {keys}" if keys else "somewhere"
    return f"its configuration has {unknown!r} {where}, which transformers does not know."


def _keys_of(section: Mapping[str, Any], value: object) -> Iterator[str]:
    """The keys, also of sections within, that hold ``value``."""
    for key, held in section.items():
        if isinstance(held, Mapping):
            yield from (f"{key}.{inner}" for inner in _keys_of(held, value))
        elif held == value:
            yield str(key)
