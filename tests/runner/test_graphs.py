"""Steps of decodes from graphs give what the same steps give without."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from recording import FakeRecorder
from static_attention import StaticAttention

from pageloom import SamplingParams
from pageloom.config import load_config
from pageloom.contract import AttentionBatch
from pageloom.engine import worker
from pageloom.engine.assemble import assemble
from pageloom.errors import PageloomError
from pageloom.plugins import Plugins
from pageloom.runner import graphs
from pageloom.runner.batch import StepBatch
from pageloom.runner.graphs import (
    CUDARecorder,
    DecodeGraphs,
    DecodeInputs,
    capture_decodes,
    graph_sizes,
)
from tiny_model import write_engine, write_model

SETTINGS = [
    "scheduler.max_num_seqs=11",
    "scheduler.max_num_batched_tokens=16",
    "kv_cache.block_size=4",
    "kv_cache.num_blocks=24",
]


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """Engines on `StaticAttention`, whose cache starts as NaN."""
    folder = tmp_path_factory.mktemp("model")
    path = write_engine(folder, "attention: {backend: torch_paged}\n")
    plugins = Plugins.load()

    def build(*overrides):
        config = load_config(path, [*SETTINGS, *overrides], plugins)
        engine = assemble(config)
        backend = StaticAttention(None, engine.runner.backend.spec, None)
        backend.allocate(engine.info.num_blocks)
        engine.runner.backend = backend
        return engine

    return build


def with_graphs(engine, max_num_seqs=11):
    recorder = FakeRecorder()
    runner = engine.runner
    runner.graphs = DecodeGraphs(runner.model, runner.backend, max_num_seqs, recorder)
    return recorder


PROMPTS = [[3, 4, 5], list(range(1, 30)), [7], [7, 7], list(range(1, 21))]
PROMPTS += [[9, token] for token in range(8)]
GREEDY = SamplingParams(temperature=0, max_tokens=20, logprobs=2, ignore_eos=True)
SAMPLED = SamplingParams(n=3, temperature=0.8, seed=5, max_tokens=12, prompt_logprobs=1)
BEAMS = SamplingParams(beam_width=3, n=2, max_tokens=9)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, BEAMS], ids=["greedy", "samples", "beams"])
def test_an_engine_answers_as_without_graphs(build, params):
    """With chunked prefills in between, prefix hits, and too few blocks for all at once."""
    answers = []
    for captured in (False, True):
        engine = build()
        recorder = with_graphs(engine) if captured else None
        outputs = engine.generate(PROMPTS, params)
        outputs += engine.generate(PROMPTS[:2], params)
        answers.append([[c.token_ids for c in output.outputs] for output in outputs])
    assert answers[0] == answers[1]
    assert recorder.recordings == len(graph_sizes(11))
    assert recorder.replays > 10


def test_log_probabilities_are_those_without_graphs(build):
    found = []
    for captured in (False, True):
        engine = build()
        if captured:
            with_graphs(engine)
        outputs = engine.generate(PROMPTS[:3], GREEDY)
        found.append([lp.logprob for output in outputs for lp in output.outputs[0].logprobs])
    assert found[1] == pytest.approx(found[0], abs=1e-4)


def test_what_the_graphs_do_not_hold_is_computed_without(build, monkeypatch):
    monkeypatch.setattr(graphs, "MOST_SEQS", 2)
    engine = build()
    recorder = with_graphs(engine)
    assert recorder.recordings == 2
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    engine.generate([[5, 6], [7, 8], [9, 10]], params)
    assert recorder.replays == 0
    engine.generate([[5, 6], [7, 8]], params)
    assert recorder.replays == 5  # the first step is a prefill


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, [1]),
        (2, [1, 2]),
        (3, [1, 2, 3]),
        (8, [1, 2, 4, 8]),
        (20, [1, 2, 4, 8, 16, 20]),
        (256, [1, 2, 4, *range(8, 257, 8)]),
        (1000, [1, 2, 4, *range(8, 257, 8)]),
    ],
)
def test_the_sizes(most, sizes):
    assert graph_sizes(most) == sizes


def decodes(*sequences):
    """A step of decodes: the token, its position, and the sequence's blocks of 4 tokens."""
    tokens, positions, blocks = zip(*sequences, strict=True)
    tables = torch.zeros(len(blocks), max(map(len, blocks)), dtype=torch.int32)
    for row, table in zip(tables, blocks, strict=True):
        row[: len(table)] = torch.tensor(table)
    slots = [table[p // 4] * 4 + p % 4 for p, table in zip(positions, blocks, strict=True)]
    starts = torch.arange(len(tokens) + 1, dtype=torch.int32)
    lengths = torch.tensor(positions, dtype=torch.int32) + 1
    attention = AttentionBatch(
        starts, lengths, tables, torch.tensor(slots), starts, lengths,
        len(tokens), 1, int(lengths.max()),
    )  # fmt: skip
    return StepBatch(torch.tensor(tokens), torch.tensor(positions), attention)


def test_inputs_stay_where_they_are_and_are_filled_up_with_the_shortest_sequence():
    inputs = DecodeInputs(8, 5, torch.device("cpu"))
    made = inputs.attention(torch.ones(4, dtype=torch.int32))
    first = inputs.fill(decodes((5, 17, [9, 8, 7, 6, 5]), (6, 2, [3]), (7, 4, [2, 1])), 4)
    assert inputs.token_ids(4).tolist() == [5, 6, 7, 6]
    assert inputs.positions(4).tolist() == [17, 2, 4, 2]
    assert first.slots.tolist() == [21, 14, 4, 14]
    assert first.seq_lens.tolist() == first.seq_lens_host.tolist() == [18, 3, 5, 3]
    assert first.block_tables[3].tolist() == [3, 0, 0, 0, 0]
    assert first.query_start.tolist() == first.query_start_host.tolist() == [0, 1, 2, 3, 4]
    assert (first.num_decodes, first.max_query_len, first.max_seq_len) == (4, 1, 18)

    again = inputs.fill(decodes((1, 0, [4]), (2, 3, [5]), (3, 1, [6]), (4, 2, [7])), 4)
    assert again.block_tables.tolist() == [[n, 0, 0, 0, 0] for n in (4, 5, 6, 7)]
    for name in ("query_start", "seq_lens", "block_tables", "slots"):
        tensors = [getattr(batch, name) for batch in (made, first, again)]
        assert len({(x.data_ptr(), x.shape, x.stride()) for x in tensors}) == 1


def test_what_cannot_be_captured_is_an_error_that_says_what_to_do(build):
    engine = build()
    forward = engine.runner.model.forward

    def waits(token_ids, positions, attend):
        int(token_ids.sum())
        return forward(token_ids, positions, attend)

    engine.runner.model.forward = waits
    with pytest.raises(
        PageloomError, match=r"a step of 11 decodes cannot be captured.*enforce_eager"
    ):
        with_graphs(engine)


def test_a_cuda_graph_is_captured_after_a_run_on_the_stream_that_captures(monkeypatch):
    happened = []

    class Graph:
        def replay(self):
            happened.append("replay")

    def enter(graph):
        assert graph.capture_stream is side
        assert graph.pool == ("pool",)
        happened.append("begin")

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: side)
    side = SimpleNamespace(wait_stream=lambda stream: happened.append("wait for the engine"))
    main = SimpleNamespace(wait_stream=lambda stream: happened.append("wait for the run"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: main)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda.graph, "__enter__", enter)
    monkeypatch.setattr(torch.cuda.graph, "__exit__", lambda *error: happened.append("end"))

    def compute():
        happened.append("compute")
        return len(happened)

    replay = CUDARecorder(torch.device("cuda"))(compute)
    assert happened == [
        "wait for the engine", "compute", "wait for the run", "begin", "compute", "end"
    ]  # fmt: skip
    assert replay() == replay() == 5
    assert happened[6:] == ["replay", "replay"]


def test_only_gpus_and_what_supports_them_have_graphs():
    spec = SimpleNamespace(device=torch.device("cpu"))
    yes, no = (SimpleNamespace(supports_cuda_graphs=s, spec=spec) for s in (True, False))
    assert capture_decodes(yes, yes, 8) is None
    spec.device = torch.device("cuda")
    assert capture_decodes(no, yes, 8) is None
    assert capture_decodes(yes, no, 8) is None


def test_enforce_eager_captures_nothing(build, monkeypatch):
    asked = []
    monkeypatch.setattr(worker, "capture_decodes", lambda *given: asked.append(given))
    engine = build()
    assert [given[2] for given in asked] == [11]
    assert asked[0][0] is engine.runner.model
    asked.clear()
    build("scheduler.max_num_seqs=100")
    assert asked[0][2] == 16  # tokens in a step
    asked.clear()
    assert build("runtime.enforce_eager=true").runner.graphs is None
    assert not asked


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_an_engine_answers_as_without_graphs(tmp_path):
    from pageloom import Engine

    write_model(tmp_path, hidden_size=96)  # heads of 16 elements
    path = tmp_path / "engine.yaml"
    path.write_text(
        f"model: {{path: {tmp_path}, loader: dummy, dtype: float32,"
        " options: {initializer_range: 0.5}}\n"
        "runtime: {device: cuda, debug: true}\n"
        "attention: {backend: triton_paged}\n"
    )
    answers = []
    for eager in ("true", "false"):
        engine = Engine.from_config(path, [*SETTINGS, f"runtime.enforce_eager={eager}"])
        assert (engine.runner.graphs is None) == (eager == "true")
        outputs = engine.generate(PROMPTS, GREEDY)
        answers.append([output.outputs[0].token_ids for output in outputs])
    assert answers[0] == answers[1]
