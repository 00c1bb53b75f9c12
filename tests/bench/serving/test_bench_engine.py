"""``pageloom bench engine``, as a user runs it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from pageloom.bench.statistics import Ratio, show_ratio
from pageloom.cli import main
from pageloom.config import load_config

LENGTHS = ["--prompt-tokens", "4:20", "--output-tokens", "2:12"]


def bench_engine(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "pageloom", "bench", "engine", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=1200,
    )


def test_two_configs_are_compared(contiguous, paged, tmp_path):
    result = bench_engine(
        contiguous, paged, *LENGTHS, "--requests", 12, "--rounds", 6,
        "--json", tmp_path / "run.json", "--markdown", tmp_path / "run.md",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    run = json.loads((tmp_path / "run.json").read_text())
    assert [list(done) for done in run["rounds"]] == [
        ["contiguous", "paged"], ["paged", "contiguous"]
    ] * 3  # fmt: skip
    assert run["machine"]["threads"] == 1
    assert run["configs"]["paged"]["engine"]["backend"] == "torch_paged"
    assert run["configs"]["contiguous"]["config"]["attention"]["backend"] == "naive_contiguous"
    assert len(run["trace"]) == 12
    for done in run["rounds"]:
        for replay in done.values():
            got = [(r["prompt_tokens"], r["output_tokens"]) for r in replay["requests"]]
            assert got == [(r["prompt_tokens"], r["output_tokens"]) for r in run["trace"]]

    summary = {row["metric"]: row for row in run["summary"]}

    def percentiles(name, key, percentile):
        rounds = [[r[key] for r in done[name]["requests"]] for done in run["rounds"]]
        return [float(np.percentile(values, percentile)) for values in rounds]

    for metric, key, percentile in (("ttft_p90", "ttft", 90), ("tpot_p50", "tpot", 50)):
        mine, theirs = (percentiles(name, key, percentile) for name in ("paged", "contiguous"))
        row = summary[metric]
        assert row["values"]["paged"] == pytest.approx(median(mine))
        logs = [np.log(a / b) for a, b in zip(mine, theirs, strict=True)]
        ratio = row["ratios"]["paged"]
        assert ratio["value"] == pytest.approx(np.exp(median(logs)))
        assert ratio["low"] <= ratio["value"] <= ratio["high"]
        assert ratio["confidence"] == 0.95
    total = sum(request["output_tokens"] for request in run["trace"])
    speeds = [total / done["paged"]["seconds"] for done in run["rounds"]]
    assert summary["output_tokens_per_second"]["values"]["paged"] == pytest.approx(median(speeds))
    assert summary["peak_running"]["values"]["contiguous"] == 4
    assert summary["peak_running"]["values"]["paged"] > 4
    assert 0.5 < summary["kv_utilization"]["values"]["paged"] <= 1

    markdown = (tmp_path / "run.md").read_text()
    header, _, *rows = [line for line in markdown.splitlines() if line.startswith("|")]
    assert re.split(r" *\| *", header)[2:5] == ["contiguous", "paged", "/ contiguous"]
    shown = {cells[1]: cells[2:5] for row in rows if (cells := re.split(r" *\| *", row))}
    assert len(shown) == len(summary)
    speed = summary["output_tokens_per_second"]
    assert shown["output tokens/s"][1] == f"{speed['values']['paged']:.1f}"
    assert re.fullmatch(r"\d+\.\d\d \[\d+\.\d\d, \d+\.\d\d\]", shown["output tokens/s"][2])
    for text in ("95% bootstrap intervals", "12 requests all at once", run["machine"]["cpu"]):
        assert text in markdown
    assert "output tokens/s" in result.stdout
    assert "naive_contiguous" in result.stdout


def test_one_config_with_a_trace_of_its_own(paged, tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        '{"prompt": [5, 6, 7], "output_tokens": 4, "arrival": 0.3}\n'
        '{"prompt_tokens": 9, "output_tokens": 1, "user": "a", "priority": 2}\n'
    )
    out = tmp_path / "run.json"
    result = bench_engine(paged, "--trace", trace, "--rounds", 1, "--json", out)
    assert result.returncode == 0, result.stderr
    run = json.loads(out.read_text())
    assert [(r["prompt_tokens"], r["output_tokens"], r["arrival"]) for r in run["trace"]] == [
        (9, 1, 0.0), (3, 4, 0.3)
    ]  # fmt: skip
    assert (run["trace"][0]["user"], run["trace"][0]["priority"]) == ("a", 2)
    assert run["rounds"][0]["paged"]["seconds"] >= 0.3
    assert run["rounds"][0]["paged"]["requests"][0]["tpot"] is None
    assert all(row["ratios"] == {} for row in run["summary"])


@pytest.fixture
def refused(paged, capsys):
    """Run the command in this process; its exit code is 2, and its message is returned."""

    def refused(*arguments):
        with pytest.raises(SystemExit) as caught:
            main(["bench", "engine", paged, *map(str, arguments)])
        assert caught.value.code == 2
        return " ".join(capsys.readouterr().err.split())

    return refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "0"], "the rate is 0.0, but must be above 0"),
        (["--prompt-tokens", "9:4"], "--prompt-tokens is '9:4'"),
        (["--trace", "/nowhere.jsonl"], "the trace cannot be read from /nowhere.jsonl"),
        (["--trace", "/nowhere.jsonl", "--prefix-tokens", "9"], "--trace has prompts and lengths"),
        (["--prefix-groups", "2"], "--prefix-groups needs --prefix-tokens"),
        (["--json", "/nowhere/run.json"], "there is no folder /nowhere"),
        (["--prompt-tokens", "50:500"], "paged.yaml cannot serve request 1 of the trace"),
        (["--rounds", "0"], "Invalid value for '--rounds'"),
        (["/nowhere.yaml"], "/nowhere.yaml"),
    ],
)
def test_what_cannot_be_run_is_one_clear_error(refused, arguments, message):
    assert message in refused(*arguments)


def test_more_requests_than_the_file_has(refused, tmp_path):
    trace = tmp_path / "one.jsonl"
    trace.write_text('{"prompt_tokens": 9, "output_tokens": 1}\n')
    assert f"{trace} has 1 request, fewer than --requests 2" in refused(
        "--trace", trace, "--requests", 2
    )


def test_the_configs_that_come_along_load_and_get_the_same_memory():
    folder = Path(__file__).parents[3] / "configs" / "bench"
    formats = ("kv_fp8", "kv_fp8_static", "kv_int8", "kv_int4")
    names = ("contiguous", "paged", "prefix_caching_off", "least_computed", *formats)
    loaded = {name: load_config(folder / f"{name}.yaml") for name in names}
    shared = {
        (config.model.path, config.model.max_model_len, config.kv_cache.memory_bytes)
        for config in loaded.values()
    }
    assert len(shared) == 1
    assert loaded["contiguous"].attention.backend == "naive_contiguous"
    assert (loaded["paged"].attention.backend, loaded["paged"].kv_cache.block_size) == (
        "torch_paged", 16
    )  # fmt: skip


def test_a_ratio_shows_how_much_is_behind_it():
    assert show_ratio(None) == ""
    assert show_ratio(Ratio(2.0, 2.0, 2.0, 1, None)) == "2.00"
    assert show_ratio(Ratio(2.0, 1.5, 3.0, 3, None)) == "2.00 (1.50 to 3.00)"
    assert show_ratio(Ratio(2.0, 1.5, 3.0, 6, 0.95)) == "2.00 [1.50, 3.00]"
