"""The CUDA kernels, run by the emulator, against what every backend must do."""

from __future__ import annotations

import pytest
import torch
from emulation import EmulatedCUDAPaged

from pageloom.contract import native
from pageloom.testing import AttentionSuite

pytestmark = pytest.mark.skipif(
    native.find_compiler() is None, reason="there is no C++ compiler to build the emulator with"
)


class PlainPath(EmulatedCUDAPaged):
    """The kernel for float32 only."""

    @classmethod
    def check(cls, spec):
        if spec.dtype is not torch.float32:
            return "has float32 only here"
        return super().check(spec)


class TensorCorePath(EmulatedCUDAPaged):
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
