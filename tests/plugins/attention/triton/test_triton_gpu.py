"""`triton_paged` where it is meant to run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pageloom.testing import AttentionSuite
from pageloom.testing.attention_cases import Case, layer
from pageloom.testing.attention_shadow import Branch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


class TestTritonPagedOnGPU(AttentionSuite):
    backend = "triton_paged"
    device = "cuda"


def test_a_graph_of_a_decode_step_serves_steps_with_longer_contexts():
    case = Case((layer(8, 2, 128),), torch.bfloat16, max_model_len=4096)
    rig = TestTritonPagedOnGPU().rig(case, tokens=8192)
    branches = [Branch(), Branch()]
    rig.step((branches[0], 500), (branches[1], 3))
    for branch in branches:
        rig.reserve(branch, 4096)
    tables = torch.tensor([branch.blocks for branch in branches], dtype=torch.int32, device="cuda")

    def batch(lengths):
        made = rig._batch([(b.blocks, n - 1, 1) for b, n in zip(branches, lengths, strict=True)])
        return replace(made, block_tables=tables)

    static = batch([501, 4])
    q, k, v = (x.contiguous() for x in rig.draw(0, 2))
    out, expected = torch.empty_like(q), torch.empty_like(q)
    rig.backend.plan(static)
    rig.backend.forward(0, q, k, v, out)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rig.backend.forward(0, q, k, v, out)

    # Contexts that are split where the captured ones were not: what they hold is NaN but for the
    # tokens written here, so the first is filled by a prefill.
    rig.step((branches[0], 3000))
    for lengths in ([502, 5], [3501, 6], [3502, 7]):
        step = batch(lengths)
        for tensor in (q, k, v):
            tensor.normal_()
        rig.backend.plan(step)
        rig.backend.forward(0, q, k, v, expected)
        for name in ("query_start", "seq_lens", "slots"):
            getattr(static, name).copy_(getattr(step, name))
        rig.backend.plan(
            replace(static, seq_lens_host=step.seq_lens_host, max_seq_len=step.max_seq_len)
        )
        graph.replay()
        assert torch.equal(out, expected)
        assert not out.isnan().any()
