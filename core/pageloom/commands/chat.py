"""``pageloom chat``: talk with a model in the terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pageloom.commands.options import ConfigArgument, SetOption
from pageloom.commands.sampling import SamplingOptions, sampling_params, takes

if TYPE_CHECKING:
    from pageloom.engine.engine import Engine
    from pageloom.scheduling import SamplingParams

HELP = "/reset forgets the conversation, /exit (or Ctrl-D) leaves, Ctrl-C stops an answer"


class ChatOptions(SamplingOptions):
    max_tokens = 1024
    temperature = 0.7
    top_p = 0.95


@takes(ChatOptions)
def chat(
    path: ConfigArgument,
    overrides: SetOption,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    **sampling: Any,
) -> None:
    """Talk with a model; reads one message per line."""
    params = sampling_params(sampling)
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
