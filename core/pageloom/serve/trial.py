"""The process in which grammars of clients are tried out before the engine sees them.

It reads a `Tokenizer` and then one `Trial` after the other from standard input, each a line of
JSON, and answers each with a line: a `Verdict`. A grammar that takes too much time or memory ends
the process, which is an answer too.
"""

from __future__ import annotations

import random
import resource
import signal
import sys

import msgspec
from llguidance import LLMatcher, LLTokenizer

from pageloom.engine.guides import build_matcher, build_tokenizer, first_mask
from pageloom.scheduling.structured import Kind, StructuredOutput

CPU_SECONDS = 2.0  # for one grammar: to compile it, and for the masks of a walk through it
MEMORY = 2 << 30  # bytes of the address space
WALKS = 4
WALK_TOKENS = 32


class Tokenizer(msgspec.Struct):
    spec: str  # tokenizer.json
    vocab_size: int
    eos_token_ids: list[int]


class Trial(msgspec.Struct):
    kind: Kind
    text: str


class Verdict(msgspec.Struct):
    fault: str | None  # why the engine could not use it


def judge(tokenizer: LLTokenizer, wanted: StructuredOutput) -> str | None:
    """What is wrong with a grammar, by compiling it and following it at random for a while."""
    try:
        matcher = build_matcher(tokenizer, wanted)
        mask = first_mask(matcher, wanted)
    except ValueError as error:
        return str(error)
    ends = set(tokenizer.eos_tokens)
    for seed in range(WALKS):
        if fault := _walk(matcher.deep_copy(), mask, ends, random.Random(seed)):
            return f"structured has a {wanted.kind} that is too complex: {fault}"
    return None


def _walk(matcher: LLMatcher, mask: bytes, ends: set[int], rng: random.Random) -> str:
    for _ in range(WALK_TOKENS):
        allowed = [t for t in _tokens(mask) if t not in ends]
        if not allowed:
            break
        matcher.consume_token(rng.choice(allowed))
        if matcher.is_stopped():
            break
        mask = matcher.compute_bitmask()
    return str(matcher.get_error()).splitlines()[0] if matcher.is_error() else ""


def _tokens(mask: bytes) -> list[int]:
    return [
        8 * i + bit for i, byte in enumerate(mask) if byte for bit in range(8) if byte >> bit & 1
    ]


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server decides when this ends
    lines = iter(sys.stdin.buffer.readline, b"")
    hello = msgspec.json.decode(next(lines), type=Tokenizer)
    tokenizer = build_tokenizer(hello.spec, hello.vocab_size, hello.eos_token_ids)
    for line in lines:
        trial = msgspec.json.decode(line, type=Trial)
        # Its signal, which nobody handles, ends the process wherever it is.
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        verdict = Verdict(judge(tokenizer, StructuredOutput(trial.kind, trial.text)))
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(msgspec.json.encode(verdict) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
