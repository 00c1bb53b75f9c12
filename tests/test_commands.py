"""``pageloom generate`` and ``pageloom chat``, as a user runs them, on the demo model."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from functools import cache, partial
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from pageloom import Engine
from pageloom.cli import main

ROOT = Path(__file__).parent.parent
MODEL = str(ROOT / "configs" / "smollm2.yaml")
SMALL = ["--set", "kv_cache.memory=64MiB", "--set", "runtime.num_threads=1"]
# In bfloat16 a near tie falls one way or the other with what an engine has cached.
EXACT = [*SMALL, "--set", "model.dtype=float32"]
GREEDY = ["--temperature", "0", "--max-tokens", "8"]


@pytest.fixture(scope="module", autouse=True)
def _engines_are_made_once():
    """Of each configuration: reading the model takes longer than all else that is done here."""
    made = cache(Engine.from_config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "from_config", lambda path, sets: made(path, tuple(sets)))
        yield


@pytest.fixture
def pageloom(monkeypatch, capsys):
    """Run a command line in this process."""

    def pageloom(*arguments, stdin=""):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        return CompletedProcess(arguments, caught.value.code or 0, *capsys.readouterr())

    return pageloom


def run_process(*arguments, stdin=""):
    """The same in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "pageloom", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=1200,
    )


@pytest.fixture
def generate(pageloom):
    return partial(pageloom, "generate", MODEL, *EXACT, *GREEDY)


def test_prompts_come_from_arguments_a_file_or_standard_input(generate, tmp_path):
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
    alone = run_process("generate", MODEL, *EXACT, *GREEDY, "--json", stdin=lines)
    assert (alone.returncode, alone.stdout) == (0, given.stdout), alone.stderr


def test_streamed_json_joins_to_the_whole(generate):
    whole = json.loads(generate("--json", "The capital of France is").stdout)
    streamed = generate("--json", "--stream", "The capital of France is").stdout
    chunks = [json.loads(line) for line in streamed.splitlines()]
    assert len(chunks) == 8
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    assert [chunk["finish_reason"] for chunk in chunks] == [None] * 7 + ["length"]


def test_several_outputs_are_sections_or_lines_of_json(generate):
    wanted = ["-n", "3", "--temperature", "1", "--seed", "5", "Once upon a time", "Tomorrow"]
    result = generate("--json", *wanted)
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    numbers = [(line["index"], line["output"]) for line in lines]
    assert numbers == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert len({line["text"] for line in lines}) == 6
    assert "score" not in lines[0]
    sections = [
        f"[{prompt + 1}] {lines[3 * prompt]['prompt']}\n"
        + "\n".join(f"[output {o + 1}]\n{lines[3 * prompt + o]['text']}\n" for o in range(3))
        for prompt in (0, 1)
    ]
    assert generate(*wanted).stdout == "\n".join(sections)


def test_streamed_json_of_several_outputs_says_to_which_each_chunk_belongs(generate):
    wanted = ["--json", "-n", "2", "--temperature", "1", "--seed", "5", "Once upon a time"]
    whole = [json.loads(line) for line in generate(*wanted).stdout.splitlines()]
    chunks = [json.loads(line) for line in generate("--stream", *wanted).stdout.splitlines()]
    for output in (0, 1):
        own = [chunk for chunk in chunks if chunk["output"] == output]
        assert "".join(chunk["text"] for chunk in own) == whole[output]["text"]
        assert [chunk["finish_reason"] for chunk in own] == [None] * 7 + ["length"]


def test_beams_are_printed_best_first_with_their_scores(generate):
    wanted = ["--beam-width", "4", "--n", "2", "The capital of France is"]
    lines = [json.loads(line) for line in generate("--json", *wanted).stdout.splitlines()]
    assert [line["output"] for line in lines] == [0, 1]
    assert lines[0]["score"] > lines[1]["score"]
    assert "Paris" in lines[0]["text"]
    first, second = (f"{line['score']:.4f}]\n{line['text']}\n" for line in lines)
    plain = f"[output 1, score {first}\n[output 2, score {second}"
    assert generate(*wanted).stdout == plain
    penalized = generate("--json", "--length-penalty", "2", *wanted)
    assert json.loads(penalized.stdout.splitlines()[0])["score"] == pytest.approx(
        lines[0]["score"] / 8, rel=1e-3
    )  # the same 8 tokens, divided by 64
    streamed = generate("--stream", "--beam-width", "4", "The capital of France is")
    assert streamed.stdout == lines[0]["text"] + "\n"


def test_text_is_printed_with_statistics_beside_it(generate):
    result = generate("--chat", "--stream", "--stats", "What is the capital of France?", "Say hi.")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("[1] What is the capital of France?\nThe capital of France is")
    assert "\n\n[2] Say hi.\n" in result.stdout
    assert "tokens/s, time to first token" in result.stderr
    assert "at most 2 at once" in result.stderr
    assert "blocks of 16 tokens in use" in result.stderr
    assert "memory of cpu: weights" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "-1", "hi"], "temperature is -1.0, but must be"),
        (["-n", "0", "hi"], "n is 0, but must be"),
        (["-n", "2", "--stream", "hi"], "add --json"),
        (["-n", "3", "--beam-width", "2", "hi"], "n is 3, more than beam_width, 2"),
        (["--length-penalty", "2", "hi"], "set beam_width too"),
        (["--beam-width", "2", "--stop", "x", "hi"], "beam search does not support it"),
        (["--file", "/nowhere"], "prompts cannot be read from /nowhere"),
        (["--file", "/nowhere", "hi"], "as arguments or in --file, not both"),
        ([], "standard input holds no prompt"),
        (["caf\udce9"], "not valid Unicode"),
        (["--set", "model.max_model_len=16", "one two three four " * 9], "max_model_len is 16"),
    ],
)
def test_what_cannot_be_generated_is_one_clear_error(generate, arguments, message):
    result = generate(*arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_line_ends_at_a_line_feed_and_nothing_else(generate, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_bytes("\ufeffone\u2028line\r\n\r\ntwo\x0clines\n".encode())
    result = generate("--json", "--file", str(prompts))
    shown = [json.loads(line)["prompt"] for line in result.stdout.split("\n") if line]
    assert shown == ["one\u2028line", "two\x0clines"]
    prompts.write_bytes(b"caf\xe9\n")
    result = generate("--file", str(prompts))
    assert (result.returncode, "prompts cannot be read" in result.stderr) == (2, True)


def test_a_chat_goes_on_after_a_message_that_does_not_fit(pageloom):
    said = "Say hi.\n" + "word " * 200 + "\n/reset\nSay hi.\n"
    limits = ["--set", "model.max_model_len=128", "--temperature", "0", "--max-tokens", "20"]
    result = pageloom("chat", MODEL, *EXACT, *limits, stdin=said)
    assert result.returncode == 0
    assert result.stderr.count("max_model_len is 128") == 1
    first, second = [line for line in result.stdout.splitlines() if line]
    assert first == second


def test_a_chat_remembers_until_it_is_reset():
    told, asked = "My name is Bob. Remember it.\n", "What is my name?\n"
    said = f"{told}{asked}/reset\n{asked}/reset\n{told}/exit\nnever read\n"
    limits = ["--temperature", "0", "--max-tokens", "24", "--stop", "\n"]
    result = run_process("chat", MODEL, *EXACT, *limits, stdin=said)
    assert result.returncode == 0, result.stderr
    first, remembered, fresh, again = [line for line in result.stdout.splitlines() if line]
    assert first == again
    assert remembered != fresh
