"""The CUDA kernels on a GPU."""

from __future__ import annotations

import pytest
import torch

from pageloom.testing import AttentionSuite
from pageloom_attention.cuda_paged import nvrtc

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.version.cuda is None or not torch.cuda.is_available(), reason="needs an NVIDIA GPU"
    ),
]


class TestCUDAPaged(AttentionSuite):
    backend = "cuda_paged"
    device = "cuda"


def test_nothing_is_missing_where_there_is_a_gpu():
    """Else every case above would be skipped."""
    assert nvrtc.missing() is None
