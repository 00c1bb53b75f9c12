"""Activation-aware 4-bit weights (Lin et al. 2024, arXiv:2306.00978), found by AutoAWQ.

AutoAWQ is no longer developed. It is needed for the search alone: models that it has quantized are
read without it, and so are those of its successors, which write the same layout.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pageloom.errors import PageloomError, one_line, suggest

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

BITS = 4
GROUP_SIZES = (128, 64, 32)
OUTPUTS_PER_WORD = 8


def require_autoawq() -> None:
    """Raise `PageloomError` unless AutoAWQ is installed."""
    if importlib.util.find_spec("awq") is None:
        raise PageloomError(
            "--method awq needs the package autoawq to search for scales (nothing else does): "
            "pip install 'pageloom[awq]'"
        )


def check_group_size(group_size: int) -> None:
    """Raise `PageloomError` unless it is one that kernels are made for."""
    if group_size not in GROUP_SIZES:
        listed = ", ".join(map(str, sorted(GROUP_SIZES)))
        raise PageloomError(f"--group-size is {group_size}, but must be one of {listed}")


def check_sizes(linears: Mapping[str, torch.nn.Linear], group_size: int) -> None:
    """Raise `PageloomError` unless all of these layers, by name, can be cut into groups."""
    for name, layer in linears.items():
        if layer.out_features % OUTPUTS_PER_WORD:
            raise PageloomError(
                f"{name} has {layer.out_features} outputs, which cannot be packed by eights"
            )
    sizes = {layer.in_features: name for name, layer in linears.items()}
    fitting = [size for size in GROUP_SIZES if not any(inputs % size for inputs in sizes)]
    if group_size not in fitting:
        inputs, name = next((n, sizes[n]) for n in sorted(sizes) if n % group_size)
        works = f"--group-size {fitting[0]} works" if fitting else "no group size works"
        raise PageloomError(
            f"{name} has {inputs} inputs, which cannot be cut into groups of {group_size}; {works}"
        )


def quantize(
    model: PreTrainedModel, calibration: Sequence[Sequence[int]], group_size: int
) -> dict[str, Any]:
    """Quantize the linear layers of ``model`` in place.

    ``calibration`` is token ids, in windows of one length. Returns the ``quantization_config`` that
    belongs to the result, whose layers hold ``qweight``, ``qzeros`` and ``scales``. Raises
    `PageloomError` for a model that AutoAWQ does not know or whose layers cannot be cut into
    groups, and when AutoAWQ fails.
    """
    kind = model.config.model_type
    # It says that it is deprecated, as the command's help does, through a filter of its own.
    with warnings.catch_warnings(record=True):
        try:
            from awq.models.auto import AWQ_CAUSAL_LM_MODEL_MAP
            from awq.models.base import AwqConfig

            from pageloom.quantize.search import CPUQuantizer
        except Exception as error:  # whatever an old package meets in new ones
            raise PageloomError(f"autoawq cannot be imported: {one_line(error)}") from error
        if kind not in AWQ_CAUSAL_LM_MODEL_MAP:
            known = suggest(kind, AWQ_CAUSAL_LM_MODEL_MAP)
            raise PageloomError(f"AutoAWQ cannot quantize models of type {kind!r}; {known}")
        wrapper = AWQ_CAUSAL_LM_MODEL_MAP[kind]
        check_sizes(_linears(wrapper, model), group_size)
        settings = AwqConfig(w_bit=BITS, q_group_size=group_size, zero_point=True, version="gemm")
        wrapped = wrapper(model, kind, False, model.config, settings, processor=None)
        try:
            wrapped.quantize(
                quant_config=settings.to_dict(),
                calib_data=[list(window) for window in calibration],
                max_calib_samples=len(calibration),
                max_calib_seq_len=len(calibration[0]),
                quantizer_cls=CPUQuantizer,
            )
        except Exception as error:
            raise PageloomError(
                f"AutoAWQ failed on this model of type {kind!r}: {one_line(error)}"
            ) from error
    result: dict[str, Any] = wrapped.quant_config.to_transformers_dict()
    return result


def _linears(wrapper: Any, model: PreTrainedModel) -> dict[str, torch.nn.Linear]:
    """The layers that AutoAWQ will quantize, by their names within a block."""
    import torch

    left = getattr(wrapper, "modules_to_not_convert", None) or ()
    return {
        name: module
        for block in wrapper.get_model_layers(model)
        for name, module in block.named_modules()
        if isinstance(module, torch.nn.Linear) and not any(part in name for part in left)
    }
