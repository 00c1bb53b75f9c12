"""From a loader to a model that is ready to run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pageloom.contract import Group, Rank, WeightLoader
from pageloom.errors import one_line
from pageloom.models.architecture import DecoderArchitecture, why_not
from pageloom.models.decoder import Decoder
from pageloom.models.decoder_weights import load_decoder_weights
from pageloom.models.model import ALONE, Model, UnsupportedModelError
from pageloom.models.rope import rotary_frequencies
from pageloom.models.shards import Shard
from pageloom.ops.rope import RotaryTable

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def build_model(
    loader: WeightLoader,
    hf_config: PretrainedConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    trust_remote_code: bool = False,
    group: Group = ALONE,
) -> Model:
    """Load ``loader``'s weights into the model that ``hf_config`` describes, or into the part of
    it that is for the rank of ``group``.

    llama, mistral, qwen2 and qwen3 run in Pageloom's `Decoder`; everything else that
    ``transformers`` can load, and what a configuration of these asks for beyond the decoder, runs
    in the `TransformersModel`. Code that comes with a checkpoint is run only if
    ``trust_remote_code``. Positions up to ``max_model_len`` (tokens) can be computed.

    Raises `UnsupportedModelError` when the model cannot be served, or when tensors are missing,
    unexpected, or of another shape or dtype, by name.
    """
    own = not (trust_remote_code and _brings_code(hf_config))
    if own and (plan := _plan_decoder(hf_config, max_model_len)) is not None:
        arch, inv_freq, scale = plan
        shard = Shard.of(arch, group.rank)
        rotary = RotaryTable(inv_freq, scale, max_model_len, dtype, device)
        weights = load_decoder_weights(arch, shard, loader, dtype, device)
        return Decoder(arch, shard, rotary, weights, group)
    # Imported here: the modelling code of transformers takes seconds.
    from pageloom.models.fallback import load_transformers_model

    return load_transformers_model(
        loader,
        hf_config,
        dtype=dtype,
        device=device,
        max_model_len=max_model_len,
        trust_remote_code=trust_remote_code,
        group=group,
    )


def check_division(
    hf_config: PretrainedConfig, max_model_len: int, tensor_size: int, stages: int
) -> None:
    """Raise `UnsupportedModelError` if it is known from the configuration alone that a model cannot
    be divided so: it is cheaper to know before a process is started for each rank."""
    plan = _plan_decoder(hf_config, max_model_len)
    if plan is not None:
        for index in range(tensor_size * stages):
            shard = Shard.of(plan[0], Rank.of(index, tensor_size, stages))
            shard.mlp(plan[0])
    elif stages > 1:
        raise UnsupportedModelError(
            f"{hf_config.model_type} runs through transformers, which is not divided into pipeline "
            "stages; set parallel.pipeline_parallel_size to 1."
        )


def _plan_decoder(
    config: PretrainedConfig, max_model_len: int
) -> tuple[DecoderArchitecture, torch.Tensor, float] | None:
    """The decoder's sizes, rotary frequencies and their scale; None if it is not for `Decoder`."""
    try:
        if why_not(config) is not None:
            return None
        arch = DecoderArchitecture.from_config(config)
        return arch, *rotary_frequencies(config, max_model_len)
    except UnsupportedModelError:
        raise
    except Exception as error:  # values of types and ranges that transformers lets through
        raise UnsupportedModelError(
            f"{config.model_type} cannot be served: its configuration cannot be used "
            f"({one_line(error)})."
        ) from error


def _brings_code(config: PretrainedConfig) -> bool:
    return "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
