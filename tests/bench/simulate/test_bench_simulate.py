"""``pageloom bench simulate``, as a user runs it, and how near it comes to an engine."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from pageloom.bench.serving.trace import draw_token_ids, random_trace, with_poisson_arrivals
from pageloom.bench.simulate.accuracy import Accuracy, CPUClock, Replayer, WallClock, compare
from pageloom.bench.simulate.settings import profile_of, settings_from
from pageloom.cli import main
from pageloom.config import load_config
from pageloom.contract.costs import StepProfile
from pageloom.engine.engine import Engine
from pageloom.errors import PageloomError
from tiny_model import VOCAB, write_engine

SHORT = ("--prompt-tokens", "1:20", "--output-tokens", "1:20", "--requests", "200")


@pytest.fixture
def run(capsys):
    """The exit code, and what was printed: to standard output, and to standard error."""

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(["bench", "simulate", *map(str, arguments)])
        printed = capsys.readouterr()
        return ended.value.code, " ".join(printed.out.split()), " ".join(printed.err.split())

    return run


def rows_of(path):
    return {row["metric"]: row for row in json.loads(path.read_text())["rows"]}


def test_policies_are_compared_on_one_config(run, config, tmp_path):
    code, out, err = run(
        config, *SHORT, "--policy", "fcfs,priority,sjf,fair", "--tenants", 3, "--priorities", 2,
        "--slo", "ttft=20,e2e=60", "--window", 20, "--json", tmp_path / "all.json",
        "--output", tmp_path / "page", "--processes", 1,
    )  # fmt: skip
    assert code == 0, err
    for said in ("/ fcfs", "sjf", "Load: 200 requests", "3 tenants", "by the costs of"):
        assert said in out
    rows = rows_of(tmp_path / "all.json")
    for metric in (
        "output_tokens_per_second", "ttft_p99", "tpot_p50", "e2e_p90", "queued_p50", "preemptions",
        "recomputed_share", "cached_share", "service_gap", "goodput",
    ):  # fmt: skip
        assert set(rows[metric]["values"]) == {"fcfs", "priority", "sjf", "fair"}
    assert rows["ttft_p99"]["values"]["fcfs"] > rows["ttft_p50"]["values"]["fcfs"] > 0.5
    assert rows["ttft_p50"]["values"]["sjf"] != rows["ttft_p50"]["values"]["fcfs"]
    share = rows["goodput_share"]["values"]["fcfs"]
    assert 0 < share <= 100
    page = (tmp_path / "page" / "index.html").read_text()
    assert "Simulated serving" in page
    assert "data:image/png;base64," in page


def test_configs_are_compared_with_each_other(run, config, tmp_path):
    small = tmp_path / "small.yaml"
    small.write_text(f"extends: {config.name}\nscheduler: {{max_num_seqs: 2}}\n")
    code, _, err = run(
        config, small, *SHORT, "--json", tmp_path / "all.json", "--processes", 2, "--rate", 0.5
    )
    assert code == 0, err
    values = rows_of(tmp_path / "all.json")["e2e_p50"]["values"]
    assert values["small"] > values["engine"]


def test_a_profile_may_be_given_and_keys_set(run, tmp_path, profile):
    config = write_engine(tmp_path, "kv_cache: {block_size: 4, num_blocks: 40}\n")
    code, out, err = run(config, *SHORT, "--profile", profile, "--set", "kv_cache.num_blocks=50")
    assert code == 0, err
    assert "50 blocks of 4 tokens" in out
    assert str(profile) in out.replace(" ", "")  # long paths are broken


def test_replicas_share_the_load(run, config, tmp_path):
    common = (config, *SHORT, "--prefix-tokens", 16, "--prefix-groups", 4, "--rate", 2)
    done = {}
    for replicas, routing in ((1, "round_robin"), (20, "round_robin"), (20, "prefix")):
        code, _, err = run(
            *common, "--replicas", replicas, "--routing", routing, "--json", tmp_path / "r.json"
        )
        assert code == 0, err
        done[replicas, routing] = rows_of(tmp_path / "r.json")
    e2e = [rows["e2e_p90"]["values"]["engine"] for rows in done.values()]
    assert e2e[1] < e2e[0]
    cached = [rows["cached_share"]["values"]["engine"] for rows in done.values()]
    assert cached[2] > cached[1]


def test_a_trace_keeps_its_times(run, config, tmp_path):
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"prompt_tokens": 5, "output_tokens": 2, "arrival": 10.0, "user": "a"},
        {"prompt": [1, 2, 3], "output_tokens": 1, "arrival": 1000.0, "user": "b"},
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    code, _, err = run(config, "--trace", trace, "--json", tmp_path / "all.json")
    assert code == 0, err
    content = json.loads((tmp_path / "all.json").read_text())
    assert 1000 < content["outcomes"]["engine"]["simulated_seconds"] < 1010
    assert set(content["outcomes"]["engine"]["ttft_p99_by_tenant"]) == {"a", "b"}
    code, _, err = run(config, "--trace", trace, "--burstiness", 0.5)
    assert code == 2
    assert "--burstiness needs --rate" in err


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks into /proc")
def test_its_processes_end_with_it_even_if_it_is_killed(config):
    command = [sys.executable, "-m", "pageloom", "bench", "simulate", str(config), *SHORT]
    command[-1] = "200000"
    parent = subprocess.Popen(
        [*command, "--policy", "fcfs,sjf", "--processes", "2", "--rate", "1"],
        stderr=subprocess.DEVNULL,
    )
    try:
        # Both of them, and what looks after their semaphores.
        wait_until(lambda: len(children_of(parent.pid)) == 3)
        children = children_of(parent.pid)
    finally:
        parent.kill()
        parent.wait()
    wait_until(lambda: not any(map(is_running, children)))


def wait_until(condition):
    until = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.2)


def children_of(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--routing", "random"], "--routing is 'random'; there are least_loaded"),
        (["--policy", "fifo"], "scheduler.policy"),
        (["--lengths", "alpaka"], "--lengths is 'alpaka'; did you mean 'alpaca'?"),
        (["--lengths", "alpaca", "--prompt-tokens", "3"], "--lengths says how long all are"),
        (["--prefix-share", "0.5"], "need --prefix-tokens"),
        ([*SHORT, "--rate", "0"], "the rate is 0.0, but must be above 0"),
        (["--slo", "ttft"], "--slo has 'ttft'"),
        (["--output-tokens", "70"], "output tokens: it may have 64 together, by the least of"),
        (["--profile", "none.json"], "the profile none.json cannot be read"),
        (["--trace", "none.jsonl"], "the trace cannot be read"),
        (["--trace", "none.jsonl", "--tenants", "2"], "--trace has requests of its own"),
        (["--trace", "none.jsonl", "--prefix-share", "0"], "--trace has requests of its own"),
    ],
)
def test_what_cannot_be_simulated_is_one_clear_error(run, config, arguments, message):
    code, _, err = run(config, *arguments)
    assert code == 2
    assert message in err


def test_several_configs_and_policies_do_not_go_together(run, config):
    code, _, err = run(config, config, "--policy", "fcfs")
    assert code == 2
    assert "--policy needs one CONFIG" in err


def test_without_a_profile_it_is_said_how_to_make_one(run, tmp_path):
    code, _, err = run(write_engine(tmp_path))
    assert code == 2
    assert "pageloom bench profile CONFIG --out FILE makes one" in err


def test_memory_is_as_the_engine_would_take_it(config, profile):
    loaded = load_config(config, ["kv_cache.num_blocks=null", "kv_cache.memory=1MiB"])
    found = profile_of(loaded, None)
    assert settings_from(loaded, found, "x").num_blocks == 2**20 // 4096
    loaded.kv_cache.block_size = 8
    assert settings_from(loaded, found, "x").num_blocks == 2**20 // 8192
    loaded.kv_cache.enable_prefix_caching = False
    assert settings_from(loaded, found, "x").num_blocks == 8 * 64 // 8  # max_num_seqs of longest
    loaded.kv_cache.memory = None
    assert settings_from(loaded, found, "x").num_blocks == 64 * 4 // 8  # as the profile's
    loaded.kv_cache.memory = 100
    with pytest.raises(PageloomError, match="no KV block of 8,192 bytes fits"):
        settings_from(loaded, found, "x")


def test_memory_needs_a_profile_that_tells_the_bytes_of_a_block(config, profile):
    loaded = load_config(config, ["kv_cache.num_blocks=null", "kv_cache.memory=1MiB"])
    found = profile_of(loaded, None)
    untold = replace(found, worker=replace(found.worker, bytes_per_block=0))
    with pytest.raises(PageloomError, match=r"kv_cache\.memory is 1MiB, but .*num_blocks instead"):
        settings_from(loaded, untold, "x")
    loaded.kv_cache.memory = None
    assert settings_from(loaded, untold, "x").num_blocks == 64


def test_the_kv_format_must_be_that_of_the_profile(run, config, profile):
    fp8 = ("--set", "kv_cache.quantizer=fp8_e4m3")
    code, _, err = run(config, *SHORT, *fp8)
    assert code == 2
    assert "engine: kv_cache.quantizer is fp8_e4m3, but the profile was measured with null" in err
    found = StepProfile.read(profile)
    replace(found, measured={"quantizer": "fp8_e4m3"}).write(profile)
    code, _, err = run(config, *SHORT, *fp8)
    assert code == 0, err
    code, _, err = run(config, *SHORT)
    assert code == 2
    assert "kv_cache.quantizer is null, but the profile was measured with fp8_e4m3" in err


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_it_is_said_that_swaps_take_no_time(run, config, tmp_path, mode):
    code, out, err = run(
        config, *SHORT, "--rate", 1000, "--json", tmp_path / "all.json",
        "--set", f"scheduler.preemption_mode={mode}", "--set", "kv_cache.swap_space=1MiB",
        "--set", "kv_cache.num_blocks=12",
    )  # fmt: skip
    assert code == 0, err
    counts = json.loads((tmp_path / "all.json").read_text())["outcomes"]["engine"]["counts"]
    assert counts["preemptions"] > 0
    assert ("swapped_blocks" in counts) == (mode == "swap")
    assert ("Blocks were swapped, which takes no time" in out) == (mode == "swap")


@pytest.mark.parametrize("clock", [CPUClock, WallClock])
def test_a_trace_is_served_for_real_and_simulated(tmp_path, profile, clock):
    more = "kv_cache: {block_size: 4, num_blocks: 64, swap_space: null}\n"
    path = write_engine(tmp_path, more)
    slow = StepProfile.read(profile)
    replace(slow, costs=replace(slow.costs, constant=60.0)).write(profile)
    loaded = load_config(path)
    settings = settings_from(loaded, profile_of(loaded, str(profile)), "simulated")
    trace = random_trace(6, prompt_tokens=(4, 20), output_tokens=(2, 9))
    trace = draw_token_ids(with_poisson_arrivals(trace, 50.0), VOCAB)
    with Engine.from_config(path) as engine:
        rounds = []
        replayer = Replayer(engine, clock())
        found = {a.name: a for a in compare(replayer, settings, trace, 2, rounds.append)}
    assert rounds == [0, 1]
    # The profile's steps take a minute or more, this model's some milliseconds.
    for name in ("TTFT mean, s", "TPOT mean, s", "end to end mean, s"):
        assert found[name].simulated > 60
        assert found[name].simulated > max(found[name].measured) > 0
    assert found["output tokens/s"].ratio < 1
    assert found["TTFT p90, s"].simulated >= found["TTFT p50, s"].simulated


def test_an_accuracy_is_a_ratio_with_its_range():
    accuracy = Accuracy("TTFT", 2.0, [1.0, 4.0, 2.5])
    assert accuracy.ratio == pytest.approx(0.8)
    assert accuracy.range == (0.5, 2.0)
