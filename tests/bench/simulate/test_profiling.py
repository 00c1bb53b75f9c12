"""Steps are timed by kind, and costs are fitted to the times."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pageloom.bench.simulate.fit import fit, non_negative
from pageloom.bench.simulate.measure import StepTimer, measure, worker_report
from pageloom.bench.simulate.points import DECODES_AFTER, Point, points
from pageloom.cli import main
from pageloom.contract.costs import StepCosts, StepProfile
from pageloom.engine.engine import Engine
from pageloom.errors import PageloomError
from pageloom.scheduling import Limits
from tiny_model import VOCAB, write_engine

LIMITS = Limits(max_num_seqs=64, max_num_batched_tokens=512, max_model_len=2048, block_size=16)


@given(
    st.integers(1, 80), st.integers(1, 600), st.integers(8, 4096), st.integers(1, 64), st.booleans()
)
def test_every_point_keeps_the_limits(seats, budget, longest, size, chunked):
    limits = Limits(seats, budget, longest, size, enable_chunked_prefill=chunked)
    for point in points(limits, 200):
        assert point.decodes + bool(point.chunk) <= seats
        assert 0 < point.tokens <= budget
        assert point.blocks(size) <= 200
        assert point.context + 1 + DECODES_AFTER < longest
        assert point.chunk_context + point.chunk + DECODES_AFTER < longest
        assert chunked or not point.chunk_context


def test_points_are_of_every_sort():
    found = points(LIMITS, 512)
    assert any(point.decodes == 64 for point in found)
    assert any(point.chunk == 512 for point in found)
    assert any(point.chunk_context for point in found)
    assert any(point.decodes and point.chunk for point in found)
    assert len(found) == len(set(found))


def test_basic_points_have_every_batch_and_every_chunk():
    found = points(LIMITS, 512)
    basic = [point for point in found if point.is_basic]
    assert {point.decodes for point in basic} >= {1, 2, 4, 8, 16, 32, 64}
    assert {point.chunk for point in basic} >= {8, 32, 128, 256, 512}
    assert len(basic) < len(found) / 2


def test_costs_are_found_again_from_steps_that_have_them():
    true = StepCosts(
        constant=0.02,
        tokens=((1, 0.0), (64, 0.05), (512, 1.2)),
        sequence=1e-4,
        decode_context=1e-6,
        prefill_pair=1e-8,
    )
    fitted = fit({point: [true.seconds(point.work())] for point in points(LIMITS, 512)})
    assert fitted.error(100) < 1e-3
    assert fitted.error(90, unseen=True) < 0.02
    assert fitted.costs.decode_context == pytest.approx(1e-6, rel=0.05)


def test_one_disturbed_sample_of_a_step_does_not_count():
    true = StepCosts(constant=0.02, tokens=((1, 0.0), (512, 1.0)))
    fitted = fit({p: [s := true.seconds(p.work()), 100 * s, s] for p in points(LIMITS, 512)})
    assert fitted.error(100) < 1e-3
    assert fitted.steps[0].most == pytest.approx(100 * fitted.steps[0].least)


@given(st.integers(0, 1 << 30), st.integers(1, 6), st.integers(1, 12))
def test_least_squares_without_negative_values_is_the_best_there_is(seed, columns, rows):
    draw = np.random.default_rng(seed)
    matrix, target = draw.normal(size=(rows, columns)), draw.normal(size=rows)
    x = non_negative(matrix, target)
    assert (x >= 0).all()
    gradient = matrix.T @ (target - matrix @ x)
    assert (gradient <= 1e-6).all()  # nothing is gained by more of any
    assert np.abs(gradient[x > 1e-9]).max(initial=0) < 1e-6  # nor by less of those there are


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    more = "kv_cache: {block_size: 4, num_blocks: 128}\nscheduler: {max_num_seqs: 8}\n"
    engine = Engine.from_config(write_engine(tmp_path_factory.mktemp("engine"), more))
    yield engine
    engine.shutdown()


@pytest.mark.parametrize(
    "point", [Point(3, 20), Point(0, 0, 12, 0), Point(0, 0, 8, 20), Point(2, 16, 10, 4)]
)
def test_the_step_that_is_timed_is_the_one_that_was_meant(engine, point):
    steps = []
    submit = engine.executor.submit

    def watched(step):
        steps.append(sorted(zip(step.query_lens, step.seq_lens, strict=True)))
        submit(step)

    timer = StepTimer(engine)
    timer.fill(5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.executor, "submit", watched)
        taken = timer.run(point)
    expected = [(1, point.context + 1)] * point.decodes
    if point.chunk:
        expected.append((point.chunk, point.chunk_context + point.chunk))
    assert steps[0] == sorted(expected)
    assert len(steps) == 1 + DECODES_AFTER
    assert all(query == 1 for step in steps[1:] for query, _ in step)
    assert point in taken
    assert all(seconds > 0 for samples in taken.values() for seconds in samples)
    assert engine.planner.pool.num_used == 0


def test_a_policy_that_holds_requests_back_cannot_be_profiled(engine, monkeypatch):
    timer = StepTimer(engine)
    timer.run(Point(2, 8))
    monkeypatch.setattr(type(engine.planner.scheduler), "schedule", _only_the_first)
    with pytest.raises(PageloomError, match=r"planned a step of 1 tokens where 2 were ready"):
        timer.run(Point(2, 8))
    assert engine.planner.pool.num_used == 0


def _only_the_first(policy, view, plan):
    plan.run(next(iter([*view.running, *view.waiting])))


def test_measuring_reports_its_progress_and_takes_each_step_thrice(engine):
    said = []
    timings = measure(StepTimer(engine), 2, lambda what, share: said.append((what, share)))
    assert min(map(len, timings.values())) >= 3
    assert said[0] == ("filling the cache", 0.0)
    assert said[-1][0].startswith("pass ")
    assert [share for _, share in said] == sorted(share for _, share in said)
    report = worker_report(engine)
    assert (report.vocab_size, report.block_size, report.num_blocks) == (VOCAB, 4, 128)


def test_the_command_writes_a_profile_that_can_be_read(tmp_path, capsys):
    more = "kv_cache: {block_size: 4, num_blocks: 128}\nscheduler: {max_num_seqs: 8}\n"
    path, out = write_engine(tmp_path, more), tmp_path / "profile.json"
    with pytest.raises(SystemExit) as ended:
        main(["bench", "profile", str(path), "--out", str(out), "--seconds", "1"])
    assert ended.value.code == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "kinds of steps" in printed
    assert "unseen: median" in printed
    profile = StepProfile.read(out)
    assert profile.worker.max_model_len == 64
    assert profile.measured["max_num_seqs"] == 8
    assert len(profile.measured["steps"]) >= 8
    assert set(profile.measured["errors"]) >= {"fit_p50", "unseen_p90"}


def test_a_folder_that_is_not_there_is_said_before_anything_is_measured(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "profile", "none.yaml", "--out", f"{tmp_path}/none/profile.json"])
    assert stopped.value.code == 2
    assert "there is no folder" in " ".join(capsys.readouterr().err.split())
