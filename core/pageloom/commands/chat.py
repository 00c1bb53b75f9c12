"""``pageloom chat``: talk with a model in the terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from pageloom.commands import ConfigArgument, SetOption
from pageloom.commands.sampling import (
    MaxTokens,
    MinP,
    RepetitionPenalty,
    Seed,
    Stop,
    Temperature,
    TopK,
    TopP,
    sampling_params,
)

if TYPE_CHECKING:
    from pageloom.engine.engine import Engine
    from pageloom.scheduling import SamplingParams

HELP = "/reset forgets the conversation, /exit (or Ctrl-D) leaves, Ctrl-C stops an answer"


def chat(
    path: ConfigArgument,
    overrides: SetOption,
    stop: Stop,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: MaxTokens = 1024,
    temperature: Temperature = 0.7,
    top_k: TopK = 0,
    top_p: TopP = 0.95,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    seed: Seed = None,
) -> None:
    """Talk with a model; reads one message per line."""
    params = sampling_params(
        stop=stop,
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )
    from pageloom.engine.engine import Engine

    engine = Engine.from_config(path, overrides)
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    if sys.stdin.isatty():
        print(HELP)
    while (said := _read()) is not None:
        if said == "/reset":
            messages = list(opening)
        elif said:
            asked = [*messages, {"role": "user", "content": said}]
            answer = _answer(engine, asked, params)
            if answer is not None:
                messages = [*asked, {"role": "assistant", "content": answer}]


def _read() -> str | None:
    """The next message, or None at the end."""
    try:
        said = input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        return None
    return None if said == "/exit" else said


def _answer(engine: Engine, messages: list[dict[str, str]], params: SamplingParams) -> str | None:
    """Print the model's answer as it comes; Ctrl-C ends it where it is.

    Returns None, and says why, if the conversation cannot be answered.
    """
    answer, ending = "", ""
    try:
        for chunk in engine.stream(engine.render_chat(messages), params):
            print(chunk.text, end="", flush=True)
            answer += chunk.text
            if chunk.finish_reason == "length":
                ending = " [cut off]"
    except KeyboardInterrupt:
        ending = " [stopped]"
    except ValueError as error:
        print(f"{error}; send something shorter, or /reset to start over", file=sys.stderr)
        return None
    print(ending, flush=True)
    return answer
