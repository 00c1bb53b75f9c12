"""Only what is right is timed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_bench import make_case, make_workload

from pageloom.bench.attention.candidates import BrokenError, Candidate, RefusedError
from pageloom.bench.attention.oracle import Oracle
from pageloom.bench.attention.peers import PEERS
from pageloom_attention.naive_contiguous import NaiveContiguous
from pageloom_attention.torch_paged import TorchPaged

CASES = {
    "decode": make_case(batch=6),
    "decode, float16": make_case(batch=6, dtype="float16"),
    "prefill": make_case("prefill", 2, 33, 33),
    "chunk behind a prefix": make_case("prefill", 2, 50, 7, "bfloat16"),
    "mixed": make_case("mixed", 6, 50, 9),
    "blocks of 1": make_case(batch=5, block_size=1),
    "a context of one": make_case(context=1),
}


def error_of(backend, case, layers=2):
    workload = make_workload(case, layers)
    with torch.inference_mode():
        oracle = Oracle(workload, None)
        return oracle.error(Candidate("it", "test", backend).prepare(workload, None))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("backend", [TorchPaged, NaiveContiguous, PEERS["sdpa"]])
def test_what_is_right_passes(backend, case):
    if backend is not TorchPaged:
        case = replace(case, block_size=None)
    assert error_of(backend, case) <= 1


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_masks_as_it_should(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    for case in CASES.values():
        assert error_of(PEERS["flex"], replace(case, block_size=None)) <= 1


class FirstTable(TorchPaged):
    """Uses the first sequence's blocks for all."""

    def plan(self, batch):
        tables = batch.block_tables[:1].expand_as(batch.block_tables)
        super().plan(replace(batch, block_tables=tables))


class OneTokenLess(TorchPaged):
    """Overlooks the last token of long contexts."""

    def plan(self, batch):
        lengths = batch.seq_lens - (batch.seq_lens > 1000).int()
        super().plan(replace(batch, seq_lens=lengths, seq_lens_host=lengths))


class OneLayer(TorchPaged):
    """Reads the first layer's cache in every layer."""

    def gather(self, layer, rows):
        return super().gather(0, rows)


class Silent(TorchPaged):
    """Writes nothing."""

    def forward(self, layer, q, k, v, out, sinks=None): ...


@pytest.mark.parametrize(
    ("backend", "case"),
    [
        (FirstTable, make_case(batch=6)),
        (OneTokenLess, make_case(batch=2, context=1024, dtype="bfloat16")),
        (OneLayer, make_case()),
        (Silent, make_case()),
    ],
)
def test_what_is_wrong_does_not_pass(backend, case):
    assert error_of(TorchPaged, case) <= 1 < error_of(backend, case)


def test_refusals_and_failures_say_why():
    class Refuses(TorchPaged):
        @classmethod
        def check(cls, spec):
            return "has had enough"

    class Fails(TorchPaged):
        def forward(self, layer, q, k, v, out, sinks=None):
            raise RuntimeError("no kernel\nfor this")

    class Picky(TorchPaged):
        @classmethod
        def block_size(cls, requested, max_model_len):
            raise ValueError("16 or nothing")

    case = make_case(block_size=8)
    with pytest.raises(RefusedError, match=r"^has had enough$"):
        error_of(Refuses, case)
    with pytest.raises(RefusedError, match="refuses block size 8: 16 or nothing"):
        error_of(Picky, case)
    with pytest.raises(BrokenError, match="failed: RuntimeError: no kernel for this"):
        error_of(Fails, case)
    with pytest.raises(RefusedError, match="cannot be imported"):
        Candidate("it", "test", None, "cannot be imported").prepare(make_workload(), None)
