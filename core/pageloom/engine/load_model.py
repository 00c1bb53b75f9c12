"""The model that a configuration names, with what belongs to it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from pageloom.config import Config
from pageloom.contract import Group, WeightLoader
from pageloom.errors import PageloomError, one_line
from pageloom.models.architecture import LARGEST_SIZE
from pageloom.models.build import build_model, check_division
from pageloom.models.loading import open_loader
from pageloom.models.model import Model, UnsupportedModelError
from pageloom.plugins import Plugins


@dataclass(frozen=True)
class ModelSource:
    """A model that is found and understood, but whose weights are not loaded."""

    loader: WeightLoader
    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase | None
    dtype: torch.dtype
    max_model_len: int  # tokens

    @property
    def architecture(self) -> str:
        model_type: str = self.config.model_type
        return model_type

    def eos_token_ids(self, vocab_size: int) -> frozenset[int]:
        """The ids that end a generation; those that the model can never produce are left out."""
        ids = self.config.eos_token_id
        if ids is None:
            return frozenset()
        return frozenset(i for i in ([ids] if isinstance(ids, int) else ids) if 0 <= i < vocab_size)


def open_model(config: Config, plugins: Plugins) -> ModelSource:
    """Raises `PageloomError` for what cannot be read."""
    try:
        loader = _open(config, plugins)
        model_config = loader.model_config()
        return ModelSource(
            loader,
            model_config,
            _tokenizer(config.model.tokenizer, loader),
            _dtype(config.model.dtype, model_config),
            _max_model_len(config.model.max_model_len, model_config),
        )
    except (ValueError, OSError) as error:
        raise PageloomError(f"model {config.model.path}: {error}") from error


def load_model(config: Config, source: ModelSource, device: torch.device, group: Group) -> Model:
    """The part of the model that the group's rank computes. Raises `PageloomError` for what cannot
    be loaded."""
    try:
        return build_model(
            source.loader,
            source.config,
            dtype=source.dtype,
            device=device,
            max_model_len=source.max_model_len,
            trust_remote_code=config.model.trust_remote_code,
            group=group,
        )
    except (ValueError, OSError) as error:
        raise PageloomError(f"model {config.model.path}: {error}") from error
    except (RuntimeError, MemoryError) as error:  # how torch says that memory has run out
        raise PageloomError(
            f"model {config.model.path} cannot be built on {device}: {one_line(error)}"
        ) from error


def check_ranks(config: Config, source: ModelSource) -> None:
    """Raise `PageloomError` for a model that cannot be divided over the ranks of ``config``."""
    parallel = config.parallel
    try:
        check_division(
            source.config,
            source.max_model_len,
            parallel.tensor_parallel_size,
            parallel.pipeline_parallel_size,
        )
    except UnsupportedModelError as error:
        raise PageloomError(f"model {config.model.path}: {error}") from error


def load_tokenizer(config: Config) -> PreTrainedTokenizerBase | None:
    """The tokenizer alone, for those who talk to an engine elsewhere. Raises `PageloomError`."""
    try:
        return _tokenizer(config.model.tokenizer, _open(config, config.loaded_plugins))
    except (ValueError, OSError) as error:
        raise PageloomError(f"model {config.model.path}: {error}") from error


def _open(config: Config, plugins: Plugins) -> WeightLoader:
    model = config.model
    return open_loader(plugins, model.path, model.loader, model.options, model.trust_remote_code)


def _tokenizer(path: str | None, loader: WeightLoader) -> PreTrainedTokenizerBase | None:
    if path is None:
        return loader.tokenizer()
    try:
        return AutoTokenizer.from_pretrained(path)  # its code, if any, is never run
    except (OSError, ValueError) as error:
        raise PageloomError(f"model.tokenizer {path} cannot be loaded: {error}") from error


def _dtype(wanted: str, model_config: PretrainedConfig) -> torch.dtype:
    """``auto`` is the dtype that the checkpoint names, or bfloat16."""
    if wanted == "auto":
        return getattr(model_config, "dtype", None) or torch.bfloat16
    dtype: torch.dtype = getattr(torch, wanted)
    return dtype


def _max_model_len(wanted: int | None, model_config: PretrainedConfig) -> int:
    trained: int | None = getattr(model_config, "max_position_embeddings", None)
    longest = wanted or trained
    if longest is None:
        raise PageloomError("the model does not say how long it can be; set model.max_model_len")
    if trained is not None and trained < 1:
        raise PageloomError(
            f"the model's configuration has max_position_embeddings {trained}, but it must be at "
            "least 1"
        )
    if longest > LARGEST_SIZE:
        raise PageloomError(
            f"the model's configuration has max_position_embeddings {longest}; set "
            "model.max_model_len to what is needed"
        )
    if trained is not None and longest > trained:
        raise PageloomError(
            f"model.max_model_len is {longest}, but the model was made for {trained} tokens at most"
        )
    return longest
