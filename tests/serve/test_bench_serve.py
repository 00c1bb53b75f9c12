"""``pageloom bench serve``, as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from pageloom.cli import main

SHORT = ["--prompt-tokens", "4:40", "--output-tokens", "2:12", "--vocab-size", "259"]


def bench_serve(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "pageloom", "bench", "serve", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=1200,
    )


def test_two_servers_are_compared(server, tmp_path):
    result = bench_serve(
        "--url", f"one={server.url}", "--url", f"two={server.url}/v1", *SHORT,
        "--requests", 8, "--rounds", 2, "--rate", 100, "--burstiness", 0.5,
        "--prefix-tokens", 32, "--prefix-share", 0.5, "--slo", "ttft=1000,tpot=1000",
        "--json", tmp_path / "run.json", "--output", tmp_path / "page",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    run = json.loads((tmp_path / "run.json").read_text())
    assert [list(done) for done in run["rounds"]] == [["one", "two"], ["two", "one"]]
    assert run["targets"]["two"] == {"name": "two", "url": f"{server.url}/v1", "model": "tiny"}
    assert run["errors"] == {"one": {}, "two": {}}
    asked = [
        [(r["prompt_tokens"], r["output_tokens"], r["arrival"]) for r in of["requests"]]
        for done in run["rounds"] for of in done.values()
    ]  # fmt: skip
    assert all(len(one) == 8 and one == asked[0] for one in asked)
    assert len({arrival for _, _, arrival in asked[0]}) == 8
    for done in run["rounds"]:
        for of in done.values():
            for request in of["requests"]:
                assert 1 <= len(request["token_times"]) <= request["output_tokens"]
                assert request["arrival"] <= request["token_times"][0] <= request["finished"]
    summary = {row["metric"]: row for row in run["summary"]}
    assert summary["slo_share"]["values"] == {"one": 1.0, "two": 1.0}
    assert summary["ttft_p50"]["ratios"]["two"]["rounds"] == 2
    # The two are the same server, so that whichever comes second in a round finds all prompts.
    assert 0 < summary["cached_share"]["values"]["two"] < 1
    assert "TTFT p99" in result.stdout
    assert "8 requests over" in " ".join(result.stdout.split())
    page = (tmp_path / "page" / "index.html").read_text()
    assert "data:image/png;base64," in page
    assert f"{server.url}/v1, model tiny" in page


def test_a_trace_from_a_file_and_a_request_that_fails(server, tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        '{"prompt": "Once upon a time", "output_tokens": 6, "user": "a", "priority": 1}\n'
        '{"prompt_tokens": 20, "output_tokens": 3, "arrival": 0.05}\n'
        '{"prompt_tokens": 2000, "output_tokens": 3, "arrival": 0.1}\n'
    )
    out = tmp_path / "run.json"
    result = bench_serve(
        "--url", server.url, "--trace", trace, "--vocab-size", 259, "--json", out
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "1 request, status 400" in " ".join(result.stdout.split())
    run = json.loads(out.read_text())
    (done,) = run["rounds"]
    (of,) = done.values()
    assert [request["output_tokens"] for request in of["requests"]] == [6, 3, 0]
    assert "max_model_len is 1024" in of["requests"][2]["detail"]


@pytest.fixture
def refused(capsys):
    """Run the command in this process; its exit code is 2, and its message is returned."""

    def refused(*arguments):
        with pytest.raises(SystemExit) as caught:
            main(["bench", "serve", *map(str, arguments)])
        assert caught.value.code == 2
        return " ".join(capsys.readouterr().err.split())

    return refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "0"], "the rate is 0.0, but must be above 0"),
        (["--burstiness", "2"], "--burstiness needs --rate"),
        (["--rate", "1", "--burstiness", "0"], "the burstiness is 0.0"),
        (["--lengths", "sharegtp"], "did you mean 'sharegpt'"),
        (["--lengths", "alpaca", "--prompt-tokens", "9"], "leave out --trace, --prompt-tokens"),
        (["--prefix-share", "0.5"], "--prefix-share needs --prefix-tokens"),
        (["--trace", "/nowhere.jsonl"], "the trace cannot be read from /nowhere.jsonl"),
        (["--slo", "ttft"], "--slo has 'ttft'"),
        (["--json", "/nowhere/run.json"], "there is no folder /nowhere"),
        (["--url", "http://127.0.0.1:9"], "two --url are named '127.0.0.1:9'"),
        (["--url", "nonsense"], "--url is 'nonsense'"),
    ],
)
def test_what_cannot_be_run_is_one_clear_error(refused, arguments, message):
    assert message in refused("--url", "http://127.0.0.1:9", *arguments)


def test_a_server_without_the_model(server, refused):
    message = refused("--url", server.url, "--model", "nope", *SHORT)
    assert f"{server.url}/v1 does not serve a request" in message
    assert "status 404 (the model 'nope' does not exist; there is 'tiny')" in message


def test_no_request_succeeds(server, refused):
    assert "no request succeeded" in refused(
        "--url", server.url, "--requests", 1, "--prompt-tokens", 2000, "--vocab-size", 259
    )
