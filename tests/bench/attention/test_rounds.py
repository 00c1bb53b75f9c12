"""Who is timed, in which order, and what is kept."""

from __future__ import annotations

import pytest
import torch
from attention_bench import make_case

from pageloom.bench.attention import rounds
from pageloom.bench.attention.candidates import Candidate
from pageloom.bench.attention.matrix import Matrix, Settings
from pageloom.bench.attention.rates import Rates
from pageloom.bench.attention.results import as_json, read_run
from pageloom.bench.attention.rounds import layers_to_measure, run_case
from pageloom.bench.machine import Machine
from pageloom.plugins import Plugins
from pageloom_attention.torch_paged import TorchPaged

CPU = torch.device("cpu")


class Wrong(TorchPaged):
    def forward(self, layer, q, k, v, out, sinks=None):
        super().forward(layer, q, k, v, out)
        out.mul_(1.01)


class Refuses(TorchPaged):
    @classmethod
    def check(cls, spec):
        return "needs something else"


def measure(case, *candidates, **settings):
    matrix = Matrix("test.yaml", Settings(rounds=4, min_time=1e-4, kv_memory="1MiB", **settings))
    named = [Candidate(name, "test 1", backend) for name, backend in candidates]
    return run_case(case, matrix, named, Plugins(), Rates(CPU))


@pytest.mark.usefixtures("small_rates")
def test_rounds_are_interleaved_and_begin_with_another_backend(monkeypatch):
    order = []
    sample = rounds._sample
    monkeypatch.setattr(
        rounds, "_sample", lambda m, step: (order.append(m.candidate.name), sample(m, step))
    )
    result = measure(make_case(), *((name, TorchPaged) for name in "abc"))
    assert "".join(order) == "abcbcacababc"
    assert [len(one.forward) for one in result.measured] == [4, 4, 4]
    assert len(result.read) == len(result.copy) == len(result.matrix) == 4


@pytest.mark.usefixtures("small_rates")
def test_what_is_wrong_or_refused_is_not_timed_and_the_others_are():
    result = measure(make_case(), ("wrong", Wrong), ("right", TorchPaged), ("refuses", Refuses))
    assert [one.candidate.name for one in result.measured] == ["right"]
    assert result.refused == {"refuses": "needs something else"}
    assert list(result.failed) == ["wrong"]
    assert "is wrong, so it is not timed" in result.failed["wrong"]
    run = read_run(as_json([result], Machine.describe(0.0)))
    assert [entry.backend for entry in run.entries] == ["right"]
    assert [(a.backend, a.reason) for a in run.refused] == [("refuses", "needs something else")]
    assert [a.backend for a in run.failed] == ["wrong"]


@pytest.mark.usefixtures("small_rates")
def test_the_numbers_are_those_of_one_layer_of_the_whole_model():
    case = make_case(layers=8, dtype="bfloat16")
    result = measure(case, ("mine", TorchPaged))
    (entry,) = read_run(as_json([result], Machine.describe(0.0))).entries
    assert entry.case == case
    assert entry.layers == 8
    assert entry.kv_bytes == 3 * 40 * 2 * 2 * 32 * 2  # sequences, tokens, K and V, heads, ...
    (one,) = result.measured
    for i in range(4):
        assert entry.seconds[i] == pytest.approx(one.plan[i] / 8 + one.forward[i] / 8)
        assert entry.bandwidth[i] == pytest.approx(8 * entry.kv_bytes / one.forward[i])
        bounds = entry.kv_bytes / result.read[i], entry.flop / result.matrix[i]
        assert entry.roofline[i] == pytest.approx(max(bounds))


def test_as_many_layers_are_measured_as_memory_and_time_allow():
    decode = make_case(batch=32, context=1024, layers=30, head_size=64)
    layer = 2 * 32 * 1024 * 2 * 64 * 4
    assert layers_to_measure(decode, CPU, 5 * layer + 1) == 5
    assert layers_to_measure(decode, CPU, 1) == 1
    assert layers_to_measure(decode, CPU, 1 << 40) == 30
    prefill = make_case("prefill", 1, 4096, 4096, layers=30, num_heads=32, head_size=128)
    assert layers_to_measure(prefill, CPU, 1 << 40) == 1
