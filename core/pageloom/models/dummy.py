"""The dummy weight loader: random weights for a given configuration."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from pageloom.contract import Slice, WeightLoader
from pageloom.contract.pretrained import (
    CONFIG_FILE,
    HUB_PATTERNS,
    find_folder,
    read_config,
    read_tokenizer,
)

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

DEFAULT_RANGE = 0.02


class DummyLoader(WeightLoader):
    """Makes weights up, for benchmarks and for tests of anything but the text.

    ``path`` is a folder with a ``config.json``, the file itself, or a hub id, of which only the
    configuration and the tokenizer are fetched. Every module is initialised as `transformers`
    would; vectors (norm weights, biases) get noise on top, so that none is all ones or zeros. The
    tensors of a module depend on ``seed``, its name and their shapes, not on other modules. In
    tensors of more than a million elements, the first million repeats: see `RepeatedRandom`.
    """

    @dataclass
    class Config:
        seed: int = 0
        initializer_range: float | None = None
        """Standard deviation of the weights; None takes the configuration's."""
        trust_remote_code: bool = False
        """Run Python code that comes with the model, for its configuration and tokenizer."""

        def __post_init__(self) -> None:
            spread = self.initializer_range
            if spread is not None and not 0 <= spread < math.inf:
                raise ValueError(f"initializer_range must be 0 or more and finite, not {spread}")

    @classmethod
    def detect(cls, path: str) -> bool:
        """Never: random weights are for those who ask for them."""
        return False

    def model_config(self) -> PretrainedConfig:
        config = read_config(self._config_file, self.config.trust_remote_code)
        if self.config.initializer_range is not None:
            config.initializer_range = self.config.initializer_range
        return config

    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        return read_tokenizer(self._config_file.parent, self.config.trust_remote_code)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.tensors_of({})

    def tensors_of(self, parts: Mapping[str, Slice | None]) -> Iterator[tuple[str, torch.Tensor]]:
        """Each module is made whole before it is cut, so that weights do not depend on how they
        are divided."""
        import torch

        with torch.no_grad():
            for name, tensor in self._fill(self._meta_model(), parts):
                part = parts.get(name)
                yield name, tensor if part is None else part.of(name, tensor)

    @cached_property
    def _config_file(self) -> Path:
        path = Path(self.path)
        return path if path.is_file() else find_folder(self.path, HUB_PATTERNS) / CONFIG_FILE

    def _meta_model(self) -> PreTrainedModel:
        """The model with shapes and dtypes but no memory."""
        import torch
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                self.model_config(), trust_remote_code=self.config.trust_remote_code
            )
        return model

    def _fill(
        self, model: PreTrainedModel, parts: Mapping[str, Slice | None]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of ``model``, whole, but for those of which nothing is needed."""
        import torch

        from pageloom.models.repeated_random import RepeatedRandom

        spread = getattr(model.config, "initializer_range", DEFAULT_RANGE)
        saved = model.state_dict().keys()
        tied = model.all_tied_weights_keys
        for prefix, module in model.named_modules():
            own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
            names = {part: f"{prefix}.{part}" if prefix else part for part, _ in own}
            names = {part: n for part, n in names.items() if n in saved and n not in tied}
            needed = {n for n in names.values() if n not in parts or parts[n] is not None}
            if not needed:
                continue
            with torch.random.fork_rng(devices=[]):
                # Torch's CPU generator takes 32 bits of a seed.
                seed = zlib.crc32(f"{self.config.seed} {prefix}".encode())
                torch.default_generator.manual_seed(seed)
                module.to_empty(device="cpu", recurse=False)
                with RepeatedRandom():
                    model._init_weights(module)
                for part, name in names.items():
                    tensor = getattr(module, part).detach()
                    if tensor.ndim == 1 and tensor.is_floating_point():
                        tensor = tensor + torch.randn_like(tensor) * spread
                    if name in needed:
                        yield name, tensor
            module.to_empty(device="meta", recurse=False)
