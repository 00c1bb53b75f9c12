"""Scales of a quantized KV cache in a checkpoint: their names, and what they may be."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pageloom.contract.checkpoint import Checkpoint

if TYPE_CHECKING:
    from pageloom.contract.quantizer import Kind

# As tools that calibrate write them and vLLM reads them (`maybe_remap_kv_scale_name`, and the
# mapper of its compressed-tensors): beside the attention, in it or in a projection; as the output
# of a projection; and once for both.
_NAME = re.compile(
    r"(?:[^.]+\.)*?(?P<layer>\d{1,6})\.(?:[^.]+\.)*"
    r"(?:(?P<scale>[kv])_scale|(?P<output>[kv])_proj\.output_scale|kv_scale)"
)

INSTEAD = "set kv_cache.options k_scale and v_scale, and it is left unread"


def is_kv_scale(name: str) -> bool:
    """Whether a tensor of this name is a scale of the KV cache, and no weight."""
    return _NAME.fullmatch(name) is not None


def read_kv_scales(checkpoint: Checkpoint) -> dict[tuple[int, Kind], float]:
    """What `WeightLoader.kv_scales` is to return: those of all layers that have one.

    Raises `ValueError` that names tensor and file for one that is not a single finite number above
    0, and for two that differ where one is wanted.
    """
    names: dict[tuple[int, Kind], str] = {}
    scales: dict[tuple[int, Kind], float] = {}
    for name in filter(is_kv_scale, checkpoint.files):
        scale = _number(checkpoint, name)
        for place in _places(name):
            if scales.setdefault(place, scale) != scale:
                raise ValueError(
                    f"{checkpoint.files[name]} has {name!r} = {scale:g}, but {names[place]!r} is "
                    f"{scales[place]:g}; remove one of them, or {INSTEAD}"
                )
            names[place] = name
    return scales


def _places(name: str) -> Iterator[tuple[int, Kind]]:
    match = _NAME.fullmatch(name)
    if match is not None:
        kind = match["scale"] or match["output"]
        kinds: tuple[Kind, Kind] = ("k", "v")
        yield from ((int(match["layer"]), each) for each in kinds if kind in (None, each))


def _number(checkpoint: Checkpoint, name: str) -> float:
    tensor, what = checkpoint.tensor(name), f"{checkpoint.files[name]} has {name!r}"
    if tensor.numel() != 1 or tensor.dim() > 1:
        raise ValueError(
            f"{what} of shape {list(tensor.shape)}, but a scale of the KV cache is one number for "
            f"all heads of a layer; {INSTEAD}"
        )
    if not tensor.is_floating_point():
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise ValueError(f"{what} as {dtype}, but a scale must be floating point; {INSTEAD}")
    scale = float(tensor)
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"{what} = {scale:g}, but a scale must be finite and above 0; {INSTEAD}")
    return scale
