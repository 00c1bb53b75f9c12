"""The demo model through the engine equals the same weights in `transformers`."""

from __future__ import annotations

import pytest
import torch
from agreement import (
    greedy_params,
    logprob_errors,
    reference_greedy,
    reference_logprobs,
    smallest_margin,
)
from transformers import LlamaForCausalLM

from pageloom import Engine
from pageloom.config import load_config
from pageloom.plugins import Plugins

CONFIG = "configs/smollm2.yaml"
BACKENDS = ["torch_paged", "naive_contiguous"]
MAX_TOKENS = 24
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def loader():
    cls = Plugins.load().get("weight_loader", "gguf")
    return cls(cls.Config(), load_config(CONFIG).model.path)


@pytest.fixture(scope="module")
def tokenizer(loader):
    return loader.tokenizer()


@pytest.fixture(scope="module")
def reference(loader):
    torch.set_num_threads(1)
    config = loader.model_config()
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(dict(loader.tensors()), strict=False, assign=True)
    return model, missing, unexpected
