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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from pageloom.contract.component import Component

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from pageloom.contract.quantizer import Kind


@dataclass(frozen=True, slots=True)
class Slice:
    """What one rank needs of a tensor: elements ``start`` to ``stop`` of dimension ``dim``, in
    which the whole tensor has ``size``."""

    dim: int
    start: int
    stop: int
    size: int

    def of(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """That part of the tensor ``name``, a view. Raises what `check` does."""
        self.check(name, tensor.shape)
        return tensor.narrow(self.dim, self.start, self.stop - self.start)

    def check(self, name: str, shape: Sequence[int]) -> None:
        """Raise `ValueError` if the tensor ``name`` of this shape is not of `size`."""
        if len(shape) <= self.dim or shape[self.dim] != self.size:
            raise ValueError(
                f"tensor {name!r} is {list(shape)}, but dimension {self.dim}, which is divided "
                f"over ranks, must have {self.size} elements"
            )


class WeightLoader(Component, ABC):
    """Reads one model, or one rank's part of it. Made once per rank; its methods are called in the
    order `model_config`, `tokenizer`, `linear` (per linear layer), `tensors_of`, `kv_scales`.

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

    def tensors_of(self, parts: Mapping[str, Slice | None]) -> Iterator[tuple[str, torch.Tensor]]:
        """What of `tensors` one rank needs: of those in ``parts`` the slice, or nothing where that
        is None, and all others whole. ``parts`` may name tensors that there are not.

        A loader that can read a slice alone does so here: no rank should have to hold, or read,
        the whole model. Raises `ValueError` for a tensor that its slice does not fit.

        .. versionadded:: 1.2
        """
        for name, tensor in self.tensors():
            if name not in parts:
                yield name, tensor
            elif (part := parts[name]) is not None:
                yield name, part.of(name, tensor)

    supports_parts: ClassVar[bool] = False
    """Whether `linear` takes ``parts``. A loader that supplies layers without it can be used with
    ``parallel.tensor_parallel_size`` 1 only.

    .. versionadded:: 1.2
    """

    def input_unit(self, name: str) -> int:
        """The inputs of linear layer ``name`` are best cut at multiples of this, such as where
        groups that share a scale begin. Called before `linear`, only where inputs are divided.

        .. versionadded:: 1.2
        """
        return 1

    def linear(
        self,
        names: Sequence[str],
        in_features: int,
        out_features: Sequence[int],
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        parts: Sequence[Slice] | None = None,
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

        ``parts``, given only if `supports_parts`, has for each of ``names`` the slice of its
        weight ``[out, in]`` that the module is to compute with: of the outputs (dimension 0; of
        the bias likewise) or, for all alike, of the inputs. ``in_features`` and ``out_features``
        are still those of the whole layers. Raises `ValueError` that names layer and numbers for a
        slice that cannot be cut from the packed storage.

        .. versionchanged:: 1.2
           ``parts``
        """
        return None

    def kv_scales(self) -> Mapping[tuple[int, Kind], float]:
        """Scales of a quantized KV cache that the checkpoint brings, by layer and kind: what a
        stored code is multiplied by. Tensors that hold them are left out of `tensors`."""
        return {}
