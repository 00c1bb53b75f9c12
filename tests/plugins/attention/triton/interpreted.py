"""The kernels of `triton_paged` on a CPU. Triton must be imported with ``TRITON_INTERPRET=1``, so
``test_triton_interpreted.py`` runs this in a process of its own."""

from __future__ import annotations

import pytest
import torch

from pageloom import Engine, SamplingParams
from pageloom.testing import AttentionSuite
from pageloom.testing.attention_cases import CASES, Case, layer
from pageloom.testing.attention_shadow import Branch
from pageloom_attention.triton_paged import backend, work
from pageloom_attention.triton_paged.tiles import Chip, Tiles
from tiny_model import write_model

# Interpreting takes long, and these cases differ from others in nothing that the kernels branch on.
LIKE_OTHERS = {
    *(f"{heads} heads over 2" for heads in (4, 6, 8, 10, 12, 14)),
    *(f"block size {size}" for size in (2, 4, 8, 48, 64, 128)),
    *(f"bfloat16, head size {size}" for size in (64, 96, 256)),
    *(f"float16, head size {size}" for size in (64, 128)),
    *(f"{dtype}, layers of several kinds" for dtype in ("bfloat16", "float16")),
}


class TestTritonPaged(AttentionSuite):
    backend = "triton_paged"
    scale = "small"

    @pytest.mark.parametrize("name", [name for name in CASES if name not in LIKE_OTHERS])
    def test_decodes_chunks_and_prefix_hits_mix(self, name):
        super().test_decodes_chunks_and_prefix_hits_mix(name)


SPLIT = [
    Case((layer(2, 1, 80, window=40, softcap=3.0, sinks=True),), block_size=3),
    Case((layer(3, 1),), torch.bfloat16),
    Case((layer(20, 1, 16),)),
]


@pytest.mark.parametrize("case", SPLIT, ids=["window, softcap and sinks", "bfloat16", "20 heads"])
def test_the_tokens_of_a_row_may_be_split(case, monkeypatch):
    """On a chip so large that even the few tokens of this test are divided."""
    monkeypatch.setattr(backend, "INTERPRETER", Chip("interpreter", processors=24))
    monkeypatch.setattr(work, "LEAST_SPLIT", 1)
    monkeypatch.setattr(backend, "choose", lambda *shape: Tiles(16, 16, 1, 1))
    rig = TestTritonPaged().rig(case)
    merged = []
    launched = rig.backend._plan_layers

    def watched(*arguments):
        launch = launched(*arguments)
        merged.append(int((launch.merges.view(-1, 4)[:, 3] > 1).sum()))
        return launch

    monkeypatch.setattr(rig.backend, "_plan_layers", watched)
    first, second = Branch(), Branch()
    rig.step((first, 50), (second, 7))
    rig.step((first, 1), (second, 23))
    rig.step((first, 1), (second, 1))
    assert all(merged[-3:])


def test_decode_steps_of_one_size_are_launched_alike():
    """So that a CUDA graph of one serves all."""
    case = Case((layer(9, 3),))
    rig = TestTritonPaged().rig(case)
    launches = []
    for lengths in ([5, 700, 3], [64, 1, 1]):
        batch = rig._batch([([0] * 44, length - 1, 1) for length in lengths])
        rig.backend.plan(batch)
        launch = rig.backend._launches[case.layers[0]]
        launches.append(
            (launch.items.data_ptr(), launch.items.shape, launch.merges.shape, launch.merge_rows)
        )
    assert launches[0] == launches[1]
    assert torch.count_nonzero(launch.merges) == 0  # the second step is too short to be split


def test_an_engine_answers_as_with_torch_paged(tmp_path):
    write_model(tmp_path)
    path = tmp_path / "engine.yaml"
    path.write_text(
        f"model: {{path: {tmp_path}, loader: dummy, dtype: float32,"
        " options: {initializer_range: 0.5}}\n"
        "runtime: {device: cpu, num_threads: 1, debug: true}\n"
        "scheduler: {max_num_batched_tokens: 16}\n"
        "kv_cache: {block_size: 4, num_blocks: 20}\n"
    )
    prompts = [list(range(1, 30)), list(range(1, 21)), [5], [7, 7, 7]]
    answers = []
    for name in ("torch_paged", "triton_paged"):
        engine = Engine.from_config(path, [f"attention.backend={name}"])
        outputs = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=12))
        answers.append([output.outputs[0].token_ids for output in outputs])
    assert answers[0] == answers[1]
    assert sum(map(len, answers[0])) > 20
