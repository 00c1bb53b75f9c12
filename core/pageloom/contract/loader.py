"""Weight loaders.

A loader turns a model path into a configuration, a tokenizer and named tensors, and may supply
the module that computes a linear layer from its own packed storage.

A whole plugin, two files. ``pyproject.toml``::

    [project]
    name = "pageloom-npz"
    version = "0.1"
    dependencies = ["pageloom", "numpy"]

    [project.entry-points.pageloom]
    npz = "pageloom_npz"

``pageloom_npz.py``::

    from pathlib import Path
    import numpy as np, torch
    from transformers import AutoConfig, AutoTokenizer
    from pageloom.contract import WeightLoader, hookimpl

    contract_version = "1.0"

    @hookimpl
    def register_weight_loaders(register):
        register("npz", "pageloom_npz:NpzLoader")

    class NpzLoader(WeightLoader):
        @classmethod
        def detect(cls, path):
            return Path(path, "weights.npz").is_file()

        def model_config(self):
            return AutoConfig.from_pretrained(self.path)

        def tokenizer(self):
            return AutoTokenizer.from_pretrained(self.path)

        def tensors(self):
            for name, array in np.load(Path(self.path, "weights.npz")).items():
                yield name, torch.from_numpy(array)

Then ``model: {path: DIR}`` in the YAML; ``loader: npz`` forces it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pageloom.contract.component import Component

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from pageloom.contract.quantizer import Kind


class WeightLoader(Component, ABC):
    """Reads one model. Made once per engine; its methods are called once each, in the order
    `model_config`, `tokenizer`, `linear` (per linear layer), `tensors`, `kv_scales`.

    ``path`` is what the YAML says in ``model.path`` after ``${...}`` is resolved: a file, a
    folder, or a hub id that this loader understands. Errors in the files are raised as
    `ValueError` (or `OSError` for what cannot be read) and name the file, and the tensor if one
    is to blame.
    """

    def __init__(self, config: Any, path: str) -> None:
        super().__init__(config)
        self.path = path

    @classmethod
    @abstractmethod
    def detect(cls, path: str) -> bool:
        """Whether this loader is the right one for ``path``. Cheap; reads a header at most.

        Must be true only for what is surely this format: if several loaders say yes, the user is
        asked to choose by ``model.loader``.
        """

    @abstractmethod
    def model_config(self) -> PretrainedConfig:
        """The model's configuration in the terms of ``transformers``.

        ``eos_token_id`` must hold every id that ends a generation.
        """

    @abstractmethod
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer, with special tokens and chat template, or None if there is none.

        Without one, requests must be given as token ids and results come without text.
        """

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor that the model needs, under its Hugging Face name, in any order and dtype.

        Tensors of layers that `linear` supplied are left out. A tensor is read only until the
        next one is asked for, so a loader may reuse its memory.
        """

    def linear(
        self,
        names: Sequence[str],
        in_features: int,
        out_features: Sequence[int],
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> torch.nn.Module | None:
        """A module that computes the linear layers ``names`` as one, or None for a plain one.

        ``names`` has one entry for a plain layer (``model.layers.0.mlp.down_proj``) and several
        for a merged one (``...q_proj``, ``...k_proj``, ``...v_proj``). The module maps ``dtype
        [T, in_features]`` to ``dtype [T, sum(out_features)]``, outputs in the order of ``names``,
        and has its weights loaded when it is returned. It may say in an attribute
        ``weight_format: str`` what its packed tensors are called when memory is accounted for
        (``"int4"``); otherwise their dtypes are. The output layer ``lm_head`` is asked for even
        where it is the embedding matrix, which `tensors` must yield all the same. On a GPU the
        module's ``forward`` must not wait for the device, so that CUDA graphs can hold it. Models
        that run through ``transformers`` never ask: a loader that serves those must yield every
        weight in `tensors`.
        """
        return None

    def kv_scales(self) -> Mapping[tuple[int, Kind], float]:
        """Scales of a quantized KV cache that the checkpoint brings, by layer and kind: what a
        stored code is multiplied by. Tensors that hold them are left out of `tensors`."""
        return {}
