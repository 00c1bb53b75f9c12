"""Attention backends against attention by its definition."""

from __future__ import annotations

import inspect
import types
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import Case, Rig

from pageloom.contract import AttentionBackend, KVQuantizer, LayerSpec, native
from pageloom.contract import attention as attention_contract
from pageloom_attention.cpu_paged import CPUPaged
from pageloom_attention.naive_contiguous import NaiveContiguous
from pageloom_attention.torch_paged import TorchPaged


class Int8(KVQuantizer):
    """Symmetric int8; each vector ends with its own float32 scale."""

    def bytes_per_vector(self, head_size):
        return -(-head_size // 4) * 4 + 4

    def encode(self, x, layer, kind):
        x = x.float()
        scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-8) / 127
        padding = self.bytes_per_vector(x.shape[-1]) - x.shape[-1] - 4
        codes = torch.nn.functional.pad((x / scale).round(), (0, padding)).to(torch.int8)
        return torch.cat([codes.view(torch.uint8), scale.view(torch.uint8)], dim=-1)

    def decode(self, data, layer, kind, dtype):
        # The head size is not in the bytes: these tests use multiples of 4.
        return (data[..., :-4].view(torch.int8) * data[..., -4:].view(torch.float32)).to(dtype)


def layer(heads=4, kv_heads=2, head_size=16, **features):
    return LayerSpec(heads, kv_heads, head_size, scale=head_size**-0.5, **features)


PLAIN = Case((layer(),))
CASES = {
    **{f"head size {d}": Case((layer(head_size=d),)) for d in (8, 33, 64, 80, 128, 256)},
    **{
        f"{heads} heads over {kv_heads}": Case((layer(heads, kv_heads),))
        for heads, kv_heads in ((1, 1), (9, 3), (8, 1), (5, 5), (16, 2))
    },
    **{f"block size {size}": Case((layer(),), size) for size in (None, 1, 3, 16, 64, 96)},
    **{f"window {w}": Case((layer(window=w),)) for w in (1, 5, 16, 17, 200)},
    "softcap": Case((layer(softcap=2.0),)),
    "sinks": Case((layer(sinks=True),)),
    "softcap, sinks and window": Case((layer(softcap=3.0, sinks=True, window=7),), 3),
    "layers of three kinds": Case(
        (layer(), layer(6, 3, 40, window=9), layer(8, 8, 24, softcap=5.0, sinks=True))
    ),
    "bfloat16": Case((layer(9, 3, 64),), dtype=torch.bfloat16),
    "float16": Case((layer(9, 3, 64),), dtype=torch.float16),
    "bfloat16 with a window": Case((layer(window=20),), dtype=torch.bfloat16),
    "bfloat16 with sinks": Case((layer(softcap=4.0, sinks=True),), dtype=torch.bfloat16),
    "int8 cache": Case((layer(), layer(6, 2, 32)), quantizer=Int8),
    "int8 cache of bfloat16": Case(
        (layer(), layer(window=6, sinks=True)), 3, torch.bfloat16, quantizer=Int8
    ),
}


class AttentionSuite:
    """Inherit this and name a backend: it is tested in every case that it does not refuse."""

    backend: ClassVar[type[AttentionBackend]]

    def pytest_generate_tests(self, metafunc):
        if "case" in metafunc.fixturenames:
            cases = {n: c for n, c in CASES.items() if not self.case(c).refusal(self.backend)}
            metafunc.parametrize("case", cases.values(), ids=cases.keys())

    def case(self, case: Case) -> Case:
        """The case as this backend is asked it."""
        return case

    def rig(self, case: Case, **options) -> Rig:
        return Rig(self.backend, self.case(case), **options)

    def test_decodes_chunks_and_prefix_hits_mix_in_one_step(self, case):
        rig = self.rig(case)
        old, chunked, fresh = rig.branch(), rig.branch(), rig.branch()
        rig.step((old, 40), (chunked, 1))
        hit = rig.fork(old, 32)
        rig.step((chunked, 11), (old, 1), (hit, 5), (fresh, 17))
        rig.step((old, 1), (fresh, 1), (hit, 1), (chunked, 4))
        rig.step((fresh, 1), (chunked, 1), (hit, 1), (old, 1))

    def test_branches_that_share_blocks_diverge(self, case):
        rig = self.rig(case)
        parent = rig.branch()
        rig.step((parent, 37))
        children = [rig.fork(parent) for _ in range(3)]
        for _ in range(3):
            rig.step((parent, 1), *((child, 1) for child in children))
        rig.step((children[0], 6), (parent, 2), (children[1], 1))

    def test_swapped_blocks_come_back_elsewhere(self, case):
        rig = self.rig(case)
        first, second = rig.branch(), rig.branch()
        rig.step((first, 35), (second, 3))
        rig.swap(first)
        rig.step((first, 1), (second, 1))
        rig.swap(second)
        rig.step((second, 4), (first, 1))

    @pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33])
    def test_a_context_may_end_anywhere_in_a_block(self, length):
        rig = self.rig(PLAIN)
        others = [rig.branch() for _ in range(3)]
        branch = rig.branch()
        rig.step(*((other, n) for other, n in zip(others, (length + 1, 60, 3), strict=True)))
        rig.step((branch, length), (others[0], 1))
        rig.step((branch, 1), *((other, 1) for other in others))
        rig.step((branch, 2), (others[1], 1))

    def test_a_freed_block_leaves_nothing_behind(self):
        rig = self.rig(PLAIN, tokens=64)
        for length in (30, 17, 1, 48):
            branch = rig.branch()
            rig.step((branch, length))
            rig.step((branch, 1))
            rig.free(branch)

    def test_copies_happen_all_at_once(self):
        rig = self.rig(PLAIN, tokens=192)
        branches = [rig.branch() for _ in range(3)]
        rig.step(*((b, n) for b, n in zip(branches, (1, 9, 14), strict=True)))
        pairs = []
        for branch in branches:
            pairs.append((branch.blocks[0], rig.take()))
            branch.blocks = [pairs[-1][1]]
        rig.backend.copy_blocks(pairs)
        rig.backend.copy_blocks([])
        rig.release([source for source, _ in pairs])
        rig.step(*((b, 1) for b in branches))

    def test_a_prompt_may_be_long(self):
        rig = self.rig(replace(PLAIN, max_model_len=700), tokens=1400)
        first, second = rig.branch(), rig.branch()
        rig.step((first, 600))
        rig.step((second, 300), (first, 1))
        rig.step((first, 40), (second, 290))

    def test_a_branch_barely_notices_its_neighbours(self):
        answers = []
        for neighbours in ((), (3, 70, 22, 20)):
            rig = self.rig(PLAIN, seed=5)
            branch, *others = (rig.branch() for _ in range(1 + len(neighbours)))
            rig.step((branch, 21))
            state = rig.generator.get_state()
            if others:
                rig.step(*zip(others, neighbours, strict=True))
            rig.generator.set_state(state)
            answers.append(rig.step((branch, 1), *((other, 1) for other in others))[0][0])
        alone, crowded = answers
        torch.testing.assert_close(alone, crowded, atol=1e-6, rtol=1e-5)

    # One test body serves several classes; it keeps no state between them.
    @settings(max_examples=25, suppress_health_check=[HealthCheck.differing_executors])
    @given(data=st.data())
    def test_any_mix_of_steps(self, data):
        size = data.draw(st.sampled_from([1, 2, 3, 8, 16, None]), "block size")
        kind = layer(*data.draw(st.sampled_from([(1, 1), (2, 1), (3, 3), (4, 2)])), head_size=8)
        features = {
            "window": data.draw(st.sampled_from([None, None, 1, 4, 13]), "window"),
            "softcap": data.draw(st.sampled_from([None, None, 2.0]), "softcap"),
            "sinks": data.draw(st.booleans(), "sinks"),
        }
        case = Case((replace(kind, **features),), size, max_model_len=48)
        for simpler in (case, replace(case, layers=(kind,)), replace(case, block_size=None)):
            if not self.case(simpler).refusal(self.backend):
                break
        rig = self.rig(self.case(simpler), seed=data.draw(st.integers(0, 999)))
        branches = []
        for _ in range(data.draw(st.integers(1, 4), "steps")):
            action = data.draw(st.sampled_from(["none", "fork", "swap", "free"]))
            live = [b for b in branches if b.blocks]
            if live and action != "none":
                chosen = data.draw(st.sampled_from(live))
                if action == "fork":
                    branches.append(rig.fork(chosen, data.draw(st.integers(1, len(chosen)))))
                elif action == "swap" and all(rig.holders[b] == 1 for b in chosen.blocks):
                    rig.swap(chosen)
                elif action == "free":
                    rig.free(chosen)
                    branches.remove(chosen)
            if len(branches) < 5:
                branches.append(rig.branch())
            wanted = [data.draw(st.sampled_from([0, 1, 1, 2, 7, 16, 23])) for _ in branches]
            room = case.max_model_len
            work = [
                (b, n) for b, n in zip(branches, wanted, strict=True) if n and len(b) + n <= room
            ]
            if work:
                rig.step(*work)


class TestTorchPaged(AttentionSuite):
    backend = TorchPaged

    @pytest.mark.parametrize("name", CASES)
    def test_refuses_no_case(self, name):
        assert CASES[name].refusal(self.backend) is None


@pytest.mark.skipif(native.find_compiler() is None, reason="there is no C++ compiler")
class TestCPUPaged(AttentionSuite):
    backend = CPUPaged

    def test_refuses_only_what_it_says(self):
        refused = {name for name, case in CASES.items() if case.refusal(self.backend)}
        assert refused == {"float16", "int8 cache", "int8 cache of bfloat16"}


class TestNaiveContiguous(AttentionSuite):
    backend = NaiveContiguous

    def case(self, case: Case) -> Case:
        """Its block size is no choice."""
        return replace(case, block_size=None)

    @pytest.mark.parametrize("name", CASES)
    def test_refuses_no_case_for_anything_but_its_block_size(self, name):
        assert self.case(CASES[name]).refusal(self.backend) is None


def documented_example() -> type[AttentionBackend]:
    """The backend in the contract's docstring, imported as the module that it says it is."""
    text = inspect.getdoc(attention_contract).split("``pageloom_mine.py``::", 1)[1]
    lines = text.split("\nThen ``attention:", 1)[0].splitlines()
    module = types.ModuleType("pageloom_mine")
    exec(compile(inspect.cleandoc("\n".join(lines)), "pageloom_mine.py", "exec"), module.__dict__)
    return module.Mine


class TestDocumentedExample(AttentionSuite):
    backend = documented_example()

    def test_refuses_only_what_it_says(self):
        refused = {name for name, case in CASES.items() if case.refusal(self.backend)}
        expected = {name for name in CASES if any(w in name for w in WHAT_THE_EXAMPLE_LACKS)}
        assert refused == expected | {"layers of three kinds"}


WHAT_THE_EXAMPLE_LACKS = ("window", "softcap", "sinks", "int8")
