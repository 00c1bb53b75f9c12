"""``pageloom generate`` and ``pageloom chat``, as a user runs them, on the demo model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SMALL = ["--set", "kv_cache.memory=64MiB", "--set", "runtime.num_threads=1"]


def pageloom(*arguments, stdin=""):
    return subprocess.run(
        [sys.executable, "-m", "pageloom", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
    )


def generate(*arguments, stdin=""):
    greedy = ["--temperature", "0", "--max-tokens", "8"]
    return pageloom("generate", "configs/smollm2.yaml", *SMALL, *greedy, *arguments, stdin=stdin)


def test_prompts_come_from_arguments_a_file_or_standard_input(tmp_path):
    prompts = ["The capital of France is", "1, 2, 3, 4,"]
    given = generate("--json", *prompts)
    assert given.returncode == 0, given.stderr
    outputs = [json.loads(line) for line in given.stdout.splitlines()]
    assert [output["prompt"] for output in outputs] == prompts
    assert "Paris" in outputs[0]["text"]
    assert outputs[1]["text"].startswith(" 5, 6")
    assert [output["finish_reason"] for output in outputs] == ["length", "length"]
    assert [len(output["token_ids"]) for output in outputs] == [8, 8]
    lines = "\n".join(prompts) + "\n"
    (tmp_path / "prompts.txt").write_text(lines)
    assert generate("--json", "--file", str(tmp_path / "prompts.txt")).stdout == given.stdout
    assert generate("--json", stdin=lines).stdout == given.stdout


def test_streamed_json_joins_to_the_whole():
    whole = json.loads(generate("--json", "The capital of France is").stdout)
    streamed = generate("--json", "--stream", "The capital of France is").stdout
    chunks = [json.loads(line) for line in streamed.splitlines()]
    assert len(chunks) == 8
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    assert [chunk["finish_reason"] for chunk in chunks] == [None] * 7 + ["length"]


def test_text_is_printed_with_statistics_beside_it():
    result = generate("--chat", "--stream", "--stats", "What is the capital of France?", "Say hi.")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("[1] What is the capital of France?\nThe capital of France is")
    assert "\n\n[2] Say hi.\n" in result.stdout
    assert "tokens/s, time to first token" in result.stderr
    assert "at most 2 at once" in result.stderr
    assert "blocks of 16 tokens in use" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "-1", "hi"], "temperature is -1.0, but must be"),
        (["--file", "/nowhere"], "prompts cannot be read from /nowhere"),
        (["--file", "/nowhere", "hi"], "as arguments or in --file, not both"),
        ([], "standard input holds no prompt"),
        (["caf\udce9"], "not valid Unicode"),
        (["--set", "model.max_model_len=16", "one two three four " * 9], "max_model_len is 16"),
    ],
)
def test_what_cannot_be_generated_is_one_clear_error(arguments, message):
    result = generate(*arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_line_ends_at_a_line_feed_and_nothing_else(tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_bytes("\ufeffone\u2028line\r\n\r\ntwo\x0clines\n".encode())
    result = generate("--json", "--file", str(prompts))
    shown = [json.loads(line)["prompt"] for line in result.stdout.split("\n") if line]
    assert shown == ["one\u2028line", "two\x0clines"]
    prompts.write_bytes(b"caf\xe9\n")
    result = generate("--file", str(prompts))
    assert (result.returncode, "prompts cannot be read" in result.stderr) == (2, True)


def test_a_chat_goes_on_after_a_message_that_does_not_fit():
    said = "Say hi.\n" + "word " * 200 + "\n/reset\nSay hi.\n"
    limits = ["--set", "model.max_model_len=128", "--temperature", "0", "--max-tokens", "20"]
    result = pageloom("chat", "configs/smollm2.yaml", *SMALL, *limits, stdin=said)
    assert result.returncode == 0
    assert result.stderr.count("max_model_len is 128") == 1
    first, second = [line for line in result.stdout.splitlines() if line]
    assert first == second


def test_a_chat_remembers_until_it_is_reset():
    said = "My name is Bob. Remember it.\nWhat is my name?\n/reset\nSay hi.\n/exit\nnever read\n"
    result = pageloom(
        "chat", "configs/smollm2.yaml", *SMALL, "--temperature", "0", "--max-tokens", "24",
        stdin=said,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    answers = [line for line in result.stdout.splitlines() if line]
    assert len(answers) >= 3
    assert "Bob" in result.stdout
