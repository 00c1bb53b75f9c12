"""``pageloom generate``: complete prompts and leave."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pageloom.commands.options import ConfigArgument, SetOption
from pageloom.commands.sampling import SamplingOptions, sampling_params, takes
from pageloom.errors import PageloomError, counted

if TYPE_CHECKING:
    from pageloom.engine.engine import Engine
    from pageloom.engine.open_request import OpenRequest
    from pageloom.engine.outputs import CompletionChunk, CompletionOutput
    from pageloom.engine.stats import EngineStats


def _early_stopping(text: str) -> bool | str:
    """As `SamplingParams` takes it, which knows what is wrong."""
    return {"true": True, "false": False}.get(text.lower(), text)


class GenerateOptions(SamplingOptions):
    n: Annotated[int, typer.Option("--n", "-n", help="Outputs per prompt.")] = 1
    beam_width: Annotated[
        int | None, typer.Option(help="Search with this many beams instead of sampling.")
    ] = None
    length_penalty: Annotated[
        float, typer.Option(help="Of beams: above 0 favors long outputs, below 0 short ones.")
    ] = 1.0
    early_stopping: Annotated[
        Any,
        typer.Option(
            metavar="true|false|never",
            parser=_early_stopping,
            help="Of beams: when the search ends once it has as many outputs: true, at once; "
            "false, when better ones are unlikely; never, when there can be none.",
        ),
    ] = "false"


@takes(GenerateOptions)
def generate(
    path: ConfigArgument,
    overrides: SetOption,
    prompts: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PROMPT]...", help="Default: one per line of standard input."),
    ] = None,
    file: Annotated[
        Path | None, typer.Option(help="Read prompts from a file, one per line.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Send each prompt as a user's message.")
    ] = False,
    stream: Annotated[
        bool,
        typer.Option("--stream", help="Print text as it comes. Beams come whole, at the end."),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per line.")
    ] = False,
    stats: Annotated[
        bool, typer.Option("--stats", help="Print speed, KV use and where memory went, at the end.")
    ] = False,
    **sampling: Any,
) -> None:
    """Complete prompts, all in one continuous batch, and print them in order."""
    params = sampling_params(sampling)
    if stream and params.n > 1 and not as_json:
        raise PageloomError(
            "with --n above 1, --stream would mix the outputs up; add --json, whose lines say to "
            "which output they belong, or leave out --stream"
        )
    texts = _read_prompts(prompts or [], file)
    from pageloom.engine.engine import Engine
    from pageloom.engine.stats import EngineStats

    engine, observed = Engine.from_config(path, overrides), EngineStats()
    engine.plugins.register_observer(observed)
    try:
        inputs = [_encode(engine, text, chat) for text in texts]
        requests = [engine.open_request(prompt, params) for prompt in inputs]
    except ValueError as error:
        raise PageloomError(str(error)) from error
    for number, (text, request) in enumerate(zip(texts, requests, strict=True)):
        parts = engine.follow(request) if stream else _outputs(engine, request)
        if as_json:
            _print_json({"index": number, "prompt": text}, request, parts)
            continue
        if len(texts) > 1:
            print(f"{chr(10) if number else ''}[{number + 1}] {text}")
        if params.n > 1:
            _print_sections(parts)
            continue
        for part in parts:
            print(part.text, end="", flush=stream)
        print(flush=True)
    if stats:
        _print_stats(engine, observed)


def _read_prompts(arguments: Sequence[str], file: Path | None) -> list[str]:
    if arguments and file:
        raise PageloomError("give prompts as arguments or in --file, not both")
    if arguments:
        return list(arguments)
    try:
        data = file.read_bytes() if file else sys.stdin.buffer.read()
        text = data.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise PageloomError(
            f"prompts cannot be read from {file or 'standard input'}: {error}"
        ) from error
    # Not `splitlines`, which also breaks lines at characters that may stand in a prompt.
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    if prompts := [line for line in lines if line.strip()]:
        return prompts
    raise PageloomError(
        f"{file or 'standard input'} holds no prompt; give one per line, or as arguments"
    )


def _encode(engine: Engine, text: str, chat: bool) -> list[int]:
    if chat:
        return engine.render_chat([{"role": "user", "content": text}])
    return engine.encode(text)


def _outputs(engine: Engine, request: OpenRequest) -> list[CompletionOutput]:
    """What a request comes to."""
    while not request.finished:
        engine.advance()
    return request.collect().outputs


def _print_sections(outputs: Iterable[CompletionChunk | CompletionOutput]) -> None:
    for output in outputs:
        score = "" if output.score is None else f", score {output.score:.4f}"
        print(f"{chr(10) if output.index else ''}[output {output.index + 1}{score}]")
        print(output.text, flush=True)


def _print_json(
    head: dict[str, Any],
    request: OpenRequest,
    parts: Iterable[CompletionChunk | CompletionOutput],
) -> None:
    """One line per part: a whole output, or a chunk of one."""
    for part in parts:
        body = {
            "output": part.index,
            "text": part.text,
            "token_ids": part.token_ids,
            "finish_reason": part.finish_reason,
            "prompt_tokens": len(request.request.prompt_token_ids),
        }
        if part.score is not None:
            body["score"] = part.score
        print(json.dumps(head | body, ensure_ascii=False), flush=True)


def _print_stats(engine: Engine, stats: EngineStats) -> None:
    ttft = f"{stats.mean_ttft:.2f} s" if stats.mean_ttft is not None else "none"
    utilization = f"{stats.kv_utilization:.1%}" if stats.kv_utilization is not None else "none"
    info = engine.info
    print(
        f"\n{counted(len(stats.requests), 'request')}, {stats.prompt_tokens} prompt + "
        f"{counted(stats.output_tokens, 'output token')} in {counted(stats.steps, 'step')}, "
        f"at most {stats.peak_running} at once\n"
        f"speed: {stats.tokens_per_second:.1f} output tokens/s, time to first token {ttft} (mean)\n"
        f"KV cache: at most {stats.peak_blocks} of {counted(info.num_blocks, 'block')} of "
        f"{counted(info.block_size, 'token')} in use, {utilization} of their slots held a token, "
        f"{counted(stats.preemptions, 'preemption')}\n"
        f"engine: {info.architecture} in {info.dtype} on {info.device}, attention {info.backend}, "
        f"scheduler {info.policy}",
        *engine.memory.lines(),
        sep="\n",
        file=sys.stderr,
    )
