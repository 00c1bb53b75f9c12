"""The CUDA kernels, run by the emulator, against what every backend must do."""

from __future__ import annotations

import pytest
import torch
from emulation import EmulatedCUDAPaged

from pageloom.contract import VectorLayout, native
from pageloom.testing import AttentionSuite
from pageloom.testing.attention_cases import PLAIN

pytestmark = pytest.mark.skipif(
    native.find_compiler() is None, reason="there is no C++ compiler to build the emulator with"
)


# Each shape of each KV format is another instance to compile: one shape has all formats, and one
# format of each kind has all shapes. test_formats.py looks at the formats themselves.
ALL_SHAPES = (VectorLayout("int4", "static"), VectorLayout("fp8_e4m3", "token_head"))
# So is each block size. These are powers of two between others that are tried.
LIKE_OTHERS = (2, 4, 64, 128)


class Fewer(EmulatedCUDAPaged):
    @classmethod
    def check(cls, spec):
        if spec.layout and spec.layers != PLAIN.layers and spec.layout not in ALL_SHAPES:
            return "has this KV format in one shape only here"
        if spec.block_size in LIKE_OTHERS:
            return "has fewer block sizes here"
        return super().check(spec)


class PlainPath(Fewer):
    """The kernel for float32 only."""

    @classmethod
    def check(cls, spec):
        if spec.dtype is not torch.float32:
            return "has float32 only here"
        return super().check(spec)


class TensorCorePath(Fewer):
    """The kernels for 16-bit types only: cases that leave the dtype open come to them."""

    @classmethod
    def check(cls, spec):
        if spec.dtype is torch.float32:
            return "has 16-bit types only here"
        return super().check(spec)


class TestPlainPath(AttentionSuite):
    backend = PlainPath
    scale = "small"


class TestTensorCorePath(AttentionSuite):
    backend = TensorCorePath
    scale = "small"
    max_examples = 5  # each is likely to be another instance to compile
