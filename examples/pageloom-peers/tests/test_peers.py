"""Both backends on a GPU, if there is one, and on the CPU with stand-ins for the libraries."""

import sys
from importlib import metadata

import pytest
import stand_ins
import torch
from pageloom_peers.flash import FlashAttention
from pageloom_peers.infer import FlashInfer

from pageloom.contract import AttentionSpec, LayerSpec
from pageloom.testing import AttentionSuite


class TestFlashAttention(AttentionSuite):
    backend = "flash_attn"
    device = "cuda"


class TestFlashInfer(AttentionSuite):
    backend = "flashinfer"
    device = "cuda"


class FlashAttentionStandIn(FlashAttention):
    @classmethod
    def missing(cls, spec):
        return None


class FlashInferStandIn(FlashInfer):
    @classmethod
    def missing(cls, spec):
        return None


@pytest.fixture
def _stand_ins(monkeypatch):
    for name in ("flash_attn", "flashinfer"):
        monkeypatch.setitem(sys.modules, name, stand_ins)


@pytest.mark.usefixtures("_stand_ins")
class TestFlashAttentionIsWrappedRight(AttentionSuite):
    backend = FlashAttentionStandIn
    scale = "small"


@pytest.mark.usefixtures("_stand_ins")
class TestFlashInferIsWrappedRight(AttentionSuite):
    backend = FlashInferStandIn
    scale = "small"


def spec(**changes):
    given = {
        "device": torch.device("cpu"),
        "dtype": torch.bfloat16,
        "layers": (LayerSpec(4, 2, 64, scale=0.125),),
        "block_size": 256,
        "max_model_len": 1024,
    }
    return AttentionSpec(**(given | changes))


@pytest.mark.parametrize("backend", [FlashAttention, FlashInfer])
def test_what_is_missing_is_named(backend, monkeypatch):
    def version(name):
        if installed is None:
            raise metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(metadata, "version", version)
    installed = None
    assert f"pip install {backend.distribution}" in backend.check(spec())
    installed = "0.1.4"
    assert backend.check(spec()).endswith("or newer, not 0.1.4")
    installed = "2.8.3"
    assert backend.check(spec()) == "needs an NVIDIA GPU, not cpu"


@pytest.mark.parametrize("backend", [FlashAttentionStandIn, FlashInferStandIn])
def test_what_a_kernel_cannot_do_is_refused(backend):
    sinks = (LayerSpec(4, 2, 64, scale=0.125, sinks=True),)
    assert backend.check(spec()) is None
    assert "float16 and bfloat16" in backend.check(spec(dtype=torch.float32))
    assert "sinks" in backend.check(spec(layers=sinks))
    assert "head sizes" in backend.check(spec(layers=(LayerSpec(4, 2, 33, scale=1.0),)))
    assert "model's dtype" in backend.check(spec(quantizer="int8"))


def test_flash_attn_has_large_blocks_only():
    assert FlashAttention.block_size(None, 1024) == 256
    assert FlashAttention.block_size(512, 1024) == 512
    with pytest.raises(ValueError, match="multiple of 256"):
        FlashAttention.block_size(16, 1024)
