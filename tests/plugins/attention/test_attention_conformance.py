"""The attention backends in the box, by the suite that anyone's must pass."""

from __future__ import annotations

import inspect
import types
from dataclasses import replace

import pytest

from pageloom.contract import AttentionBackend, native
from pageloom.contract import attention as attention_contract
from pageloom.testing import AttentionSuite
from pageloom.testing.attention_cases import CASES, QUANTIZED


class TestTorchPaged(AttentionSuite):
    backend = "torch_paged"

    @pytest.mark.parametrize("case", [*CASES.values(), *QUANTIZED.values()])
    def test_refuses_nothing(self, case):
        assert self.candidate().refusal(case) is None


class TestNaiveContiguous(AttentionSuite):
    backend = "naive_contiguous"
    scale = "small"

    def test_refuses_nothing_but_block_sizes(self):
        for case in [*CASES.values(), *QUANTIZED.values()]:
            assert self.candidate().refusal(replace(case, block_size=None)) is None


@pytest.mark.skipif(native.find_compiler() is None, reason="there is no C++ compiler")
class TestCPUPaged(AttentionSuite):
    backend = "cpu_paged"


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
        lacking = ("window", "softcap", "sinks", "several kinds")
        refused = {name for name, case in CASES.items() if self.candidate().refusal(case)}
        assert refused == {name for name in CASES if any(word in name for word in lacking)}
