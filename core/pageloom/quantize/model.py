"""The model to quantize, and the checkpoint it becomes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import save_torch_state_dict

from pageloom.contract.checkpoint import quantization
from pageloom.errors import PageloomError
from pageloom.models.fallback_load import model_on_meta, with_weights
from pageloom.models.loading import open_loader
from pageloom.plugins import Plugins

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ATTENTION = "sdpa"
STORED_DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class PlainModel:
    """A model in float32 on the CPU, as `transformers` computes it."""

    network: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    stored_dtype: torch.dtype  # what its weights take when they are written

    def save(self, quantization_config: dict[str, Any], folder: Path) -> None:
        """Write weights, configuration and tokenizer into ``folder``, as `transformers` does.

        Tensors in float32 are cast to `stored_dtype`, others (codes and scales) written as is.
        """
        network, config = self.network, self.network.config
        state = {
            name: (tensor.to(self.stored_dtype) if tensor.dtype == torch.float32 else tensor)
            for name, tensor in network.state_dict().items()
            if name not in network.all_tied_weights_keys
        }
        save_torch_state_dict({name: t.contiguous() for name, t in state.items()}, folder)
        config.dtype, config.use_cache = self.stored_dtype, True
        config.quantization_config = quantization_config
        config.save_pretrained(folder)
        if network.generation_config is not None:
            network.generation_config.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


def open_model(path: str) -> PlainModel:
    """The model at ``path``, whatever weight loader detects it; what GGUF packs is expanded.

    Raises `PageloomError` when it cannot be read, is quantized already, or has no tokenizer.
    """
    if Path(path).is_dir() and (method := quantization(Path(path))):
        raise PageloomError(f"{path} is quantized already, with {method!r}; give the plain model")
    try:
        loader = open_loader(Plugins.load(), path)
        config, tokenizer = loader.model_config(), loader.tokenizer()
        if tokenizer is None:
            raise PageloomError(f"{path} has no tokenizer, which calibration text needs")
        stored = config.dtype if config.dtype in STORED_DTYPES else torch.float16
        config.use_cache = False  # layers are computed one at a time, on whole windows
        blank = model_on_meta(config, ATTENTION, trust_remote_code=False)
        network = with_weights(blank, loader, torch.float32, torch.device("cpu"))
    except (ValueError, OSError) as error:
        raise PageloomError(str(error)) from error
    return PlainModel(network, tokenizer, stored)
