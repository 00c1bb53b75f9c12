"""Putting a loader's tensors into the model class of ``transformers``."""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from pageloom.contract import Group, WeightLoader
from pageloom.errors import one_line
from pageloom.models.fallback_parallel import Cut, divide, divided
from pageloom.models.model import ALONE, UnsupportedModelError
from pageloom.models.slots import WEIGHT_DTYPES, describe_dtype, report_weights

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_BUILDING = threading.RLock()
"""Held while ``transformers`` makes a model, in which it changes what all of torch goes by."""


def model_on_meta(
    config: PretrainedConfig, attention: str, trust_remote_code: bool
) -> PreTrainedModel:
    """The model of ``config`` without memory for its weights.

    Raises `UnsupportedModelError` when ``transformers`` has no causal language model for it, or
    when its attention cannot be replaced by the registered ``attention``.
    """
    try:
        with _BUILDING, torch.device("meta"):
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
    blank: PreTrainedModel,
    loader: WeightLoader,
    dtype: torch.dtype,
    device: torch.device,
    group: Group = ALONE,
) -> PreTrainedModel:
    """A new model of the class of ``blank`` that holds the tensors of ``loader``, or the parts of
    them that are for the tensor rank of ``group``; ``blank`` is then divided too.

    ``transformers`` renames, prefixes and merges checkpoint tensors (experts of a mixture, for
    instance), ties weights and computes buffers that are not stored, as in `from_pretrained`. The
    tensors are held once on the CPU; those that it merges are held twice for a while.

    Raises `UnsupportedModelError` that names what is missing, unexpected, misshapen or of a dtype
    that is no plain floating point, and when the model cannot be divided.
    """
    cls, cuts = type(blank), dict[str, Cut]()
    if group.rank.tensor_size > 1:
        cls, cuts = divided(cls, group), divide(blank, group)
    state = _read(blank, loader, dtype, cuts)
    with _BUILDING:
        loaded: Any = cls.from_pretrained(
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


def _read(
    blank: PreTrainedModel, loader: WeightLoader, dtype: torch.dtype, cuts: Mapping[str, Cut]
) -> dict[str, torch.Tensor]:
    """Copies of what ``loader`` yields, or of what ``cuts`` leaves of it."""
    own = blank.state_dict()
    cut_of = _cuts_in_checkpoint(blank, own, cuts)
    # Some parts must stay in float32; their tensors are not rounded first.
    plans = (blank._keep_in_fp32_modules, blank._keep_in_fp32_modules_strict)
    kept = None if any(plans) else dtype
    state: dict[str, torch.Tensor] = {}
    misshapen: list[str] = []
    mistyped: list[str] = []
    for name, tensor in loader.tensors():
        if tensor.dtype not in WEIGHT_DTYPES:
            if _is_no_weight(name, tensor, blank, own):
                state[name] = tensor.to("cpu", copy=True)
            else:
                mistyped.append(describe_dtype(name, tensor))
            continue
        if (cut := cut_of(name)) is not None:
            if tensor.shape != cut.shape:
                misshapen.append(f"{name} is {list(tensor.shape)}, not {list(cut.shape)}")
                continue
            tensor = cut.of(tensor)
        state[name] = tensor.to("cpu", kept, copy=True)
    report_weights([], [], misshapen, mistyped)
    return state


def _cuts_in_checkpoint(
    blank: PreTrainedModel, own: dict[str, torch.Tensor], cuts: Mapping[str, Cut]
) -> Callable[[str], Cut | None]:
    """The cut of a tensor by its name in a checkpoint, of which ``transformers`` makes its own."""
    rules = get_model_conversion_mapping(blank) if cuts else []
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]

    def cut_of(name: str) -> Cut | None:
        if not cuts:
            return None
        prefix = blank.base_model_prefix
        target, converter = rename_source_key(name, renamings, converters, prefix, own)
        if target not in own and name in own:
            target, converter = name, None
        cut = cuts.get(target)
        if cut is not None and converter is not None:
            raise UnsupportedModelError(
                f"{blank.config.model_type} cannot be divided: {name} of the checkpoint is "
                f"converted before it becomes part of {target}; set "
                "parallel.tensor_parallel_size to 1."
            )
        return cut

    return cut_of


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
