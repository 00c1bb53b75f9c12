"""``pageloom bench memory``, as a user runs it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pageloom.bench.memory import paper

ROOT = Path(__file__).parents[3]


def bench_memory(*arguments, env=None):
    return subprocess.run(
        [sys.executable, "-m", "pageloom", "bench", "memory", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=1200,
        env=env,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("memory")
    done = bench_memory(
        "configs/bench/memory.yaml", "--scale", "0.1", "--output", f"{folder}/report",
        "--json", f"{folder}/all.json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done, folder


def test_the_table_has_the_papers_number_beside_ours(run):
    out = " ".join(run[0].stdout.split())
    for label, published in (
        ("Orca (Max), token states", "20.4 %"),
        ("Paged, token states", "96.3 %"),
        ("Orca (Oracle)", "72.75"),
        ("beam search, 6", "55.2 %"),
    ):
        assert re.search(rf"│ {re.escape(label)} │ {published} │ \d+\.\d", out), label
    assert "OPT-13B and LLaMA-13B are alike: 800 KiB per token" in out
    assert "policy fcfs, block size 16" in out


def test_the_systems_come_in_the_papers_order(run):
    rows = json.loads((run[1] / "all.json").read_text())["rows"]
    for part in ("Figure 13: batched requests, ShareGPT", "Figure 13: batched requests, Alpaca"):
        batched = [row["ours"] for row in rows if row["figure"].startswith(part)]
        assert batched == sorted(batched)
        assert batched[0] == pytest.approx(7.0, abs=0.01)
    held = {row["label"]: row["ours"] for row in rows if row["label"].endswith(", token states")}
    assert list(held.values()) == sorted(held.values())
    assert held["Paged, token states"] > 94


def test_shares_add_up_and_every_difference_is_explained(run):
    data = json.loads((run[1] / "all.json").read_text())
    for one in [*data["serving"], *data["block_sizes"]]:
        parts = ("token_states", "reserved", "internal", "rounding", "free")
        assert sum(one["shares"][part]["mean"] for part in parts) == pytest.approx(1)
    for row in data["rows"]:
        if row["paper"] is not None:
            limit = 3 if row["unit"] == "percent" else 0.1 * row["paper"]
            assert bool(row["reasons"]) == (abs(row["ours"] - row["paper"]) > limit), row
    reasons = {reason for row in data["rows"] for reason in row["reasons"]}
    said = " ".join(run[0].stdout.split())
    assert all(" ".join(reason.split()) in said for reason in reasons)


def test_the_page_stands_alone(run):
    folder = run[1] / "report"
    page = (folder / "index.html").read_text()
    names = {"memory.png", "batched.png", "sharing.png", "block_sizes.png"}
    assert {file.name for file in folder.iterdir()} == names | {"index.html"}
    assert page.count("data:image/png;base64,") == 4
    assert not re.search(r'(src|href)="(?!data:)', page)
    for row in json.loads((run[1] / "all.json").read_text())["rows"]:
        assert f"<td>{row['label']}</td>" in page
    assert paper.CITATION in page


def test_no_model_and_no_torch_is_needed(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('torch was imported')")
    lengths = tmp_path / "lengths.jsonl"
    lengths.write_text('{"prompt_tokens": 30, "output_tokens": 12}\n')
    traces = ["--trace", f"sharegpt={lengths}", "--trace", f"Alpaca={lengths}"]
    done = bench_memory(
        "configs/bench/memory.yaml", "--scale", "0.1", *traces,
        env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "recorded for ShareGPT, Alpaca" in " ".join(done.stdout.split())
    assert "those of the trace that was given" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "scheduler.max_num_seqs=2"], "has 6 branches"),
        (["--set", "kv_cache.block_size=9999"], "kv_cache.block_size is 9999, but"),
        (["--set", "scheduler.policy=fcsf"], "did you mean fcfs?"),
        (["--scale", "0"], "Invalid value for '--scale'"),
        (["--json", "/nowhere/all.json"], "there is no folder /nowhere"),
        (["--output", "LICENSE"], "LICENSE cannot be made"),
        (["--trace", "lengths.jsonl"], "must be sharegpt or alpaca, then = and a file"),
        (["--trace", "sharegpt="], "must be sharegpt or alpaca, then = and a file"),
        (["--trace", "sharegpt=/nowhere"], "the trace cannot be read from /nowhere"),
    ],
)
def test_bad_input_is_one_clear_error(arguments, message):
    done = bench_memory("configs/bench/memory.yaml", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt_tokens": 100, "output_tokens": 2000}', "100 prompt and 2000 output tokens"),
        ('{"prompt": "text", "output_tokens": 20}', "give prompt_tokens instead"),
        ('{"prompt_tokens": 0, "output_tokens": 20}', "line 2: prompt_tokens is 0"),
    ],
)
def test_traces_that_cannot_be_served_are_refused(tmp_path, line, message):
    file = tmp_path / "trace.jsonl"
    file.write_text(f'{{"prompt": [1, 2], "output_tokens": 5}}\n{line}\n')
    done = bench_memory("configs/bench/memory.yaml", "--trace", f"alpaca={file}")
    assert done.returncode == 2
    assert message in done.stderr
