"""``benchmarks/gpu_check.py`` with everything tiny, on the CPU."""

from __future__ import annotations

import json
import re

import pytest
from attention_bench import run

from tiny_model import write_model


def gpu_check(*arguments, **variables):
    return run("benchmarks/gpu_check.py", "--device", "cpu", *arguments, **variables)


def test_without_a_gpu_it_does_what_it_can_and_says_so(tiny, tmp_path):
    result = gpu_check("--matrix", tiny, OUT=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "== suite: skipped, there is no GPU" in result.stdout
    assert "== engine: skipped, there is no GPU" in result.stdout
    report = json.loads((tmp_path / "gpu_check.json").read_text())
    assert report["skipped"].keys() == {"suite", "engine", "packed"}
    assert report["seconds"].keys() == {"rates", "table"}
    assert report["rates"].keys() == {"read_bytes", "copy_bytes", "flop_float32", "flop_bfloat16"}
    assert min(report["rates"].values()) > 1e6
    timed = {b["params"]["backend"] for b in report["table"]["benchmarks"]}
    assert timed == {"naive_contiguous", "torch_paged", "sdpa"}
    assert report["failed"] == {}


def test_the_engine_part(tmp_path):
    write_model(tmp_path, dtype="float32")
    result = gpu_check(
        "--parts", "engine", "--model", tmp_path, "--requests", 3, "--prompt-tokens", "4:8",
        "--output-tokens", "2:4", "--json", tmp_path / "out.json",
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    engine = json.loads((tmp_path / "out.json").read_text())["engine"]
    rates = {row["metric"]: row["values"] for row in engine["summary"]}
    assert rates["output_tokens_per_second"]["engine"] > 0


def test_the_suite_part_runs_every_backend_that_accepts_the_device(tmp_path):
    result = gpu_check(
        "--parts", "suite", "--scale", "small", "--suite-seconds", 380,
        "--json", tmp_path / "out.json", PAGELOOM_PLUGINS="attention",
        PYTEST_ADDOPTS="-k 'gpu or contexts_end'",  # all of it runs elsewhere
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    suite = json.loads((tmp_path / "out.json").read_text())["suite"]
    assert "needs a GPU" in suite["triton_paged"]["refused"]
    assert suite["torch_paged"]["passed"] > 3
    assert suite["torch_paged"]["failed"] == 0
    assert suite["core"]["skipped"] > 0  # needs a GPU
    assert suite["core"]["passed"] == suite["core"]["failed"] == suite["core"]["error"] == 0


def test_a_suite_that_does_not_finish_is_told(tmp_path):
    result = gpu_check("--parts", "suite", "--suite-seconds", 0.1, "--json", tmp_path / "out.json")
    assert result.returncode == 0, result.stdout + result.stderr
    suite = json.loads((tmp_path / "out.json").read_text())["suite"]
    assert suite["torch_paged"]["out_of_time"]
    assert re.search("torch_paged: .*out_of_time True", result.stdout)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--parts", "rates,tables"], "tables: there are rates, suite, table, engine, packed"),
        (["--parts", "engine"], "name a smaller --model"),
    ],
)
def test_mistakes(arguments, message):
    result = gpu_check(*arguments)
    assert result.returncode == 2
    assert message in result.stderr


def test_a_part_that_fails_leaves_the_others(tiny, tmp_path):
    write_model(tmp_path, dtype="float32", model_type="unheard_of")
    result = gpu_check(
        "--parts", "table,engine", "--matrix", tiny, "--model", tmp_path,
        "--json", tmp_path / "out.json",
    )  # fmt: skip
    assert result.returncode == 1
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["failed"].keys() == {"engine"}
    assert report["table"]["benchmarks"]
