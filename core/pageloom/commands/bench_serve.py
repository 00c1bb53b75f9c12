"""``pageloom bench serve``: load over HTTP on one server, or on several in turn."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pageloom.commands.comparing import make_trace, print_table, requests_progress
from pageloom.commands.files import make_folder, require_folder_of, write_file
from pageloom.commands.options import (
    BurstinessOption,
    JSONOption,
    LengthsOption,
    OutputOption,
    OutputTokensOption,
    PrefixGroupsOption,
    PrefixShareOption,
    PrefixTokensOption,
    PromptTokensOption,
    SLOOption,
    TraceOption,
)
from pageloom.errors import PageloomError, shorten, suggest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pageloom.bench.http.report import Report
    from pageloom.bench.http.run import Settings
    from pageloom.bench.http.slo import SLO
    from pageloom.bench.http.target import Target
    from pageloom.bench.serving.trace import Trace


def serve(
    url: Annotated[
        list[str],
        typer.Option(
            metavar="[NAME=]URL",
            help="Server of the OpenAI API; give several to compare, the first is the baseline.",
        ),
    ],
    model: Annotated[str | None, typer.Option(help="Default: the first of each server's.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Each loads every server once.")] = 1,
    requests: Annotated[
        int | None, typer.Option(min=1, help="How many; default 64, or all of --trace.")
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(help="Arrivals per second. Default: all at once, or as in --trace."),
    ] = None,
    burstiness: BurstinessOption = None,
    trace: TraceOption = None,
    seed: Annotated[int, typer.Option(help="Of lengths, token ids and arrivals.")] = 0,
    lengths: LengthsOption = None,
    prompt_tokens: PromptTokensOption = None,
    output_tokens: OutputTokensOption = None,
    prefix_tokens: PrefixTokensOption = None,
    prefix_groups: PrefixGroupsOption = None,
    prefix_share: PrefixShareOption = None,
    vocab_size: Annotated[
        int, typer.Option(min=256, help="Random token ids are below this.")
    ] = 8192,
    slo: SLOOption = None,
    timeout: Annotated[
        float, typer.Option(min=0.001, help="Seconds without a byte until a request has failed.")
    ] = 300.0,
    warm_up: Annotated[
        int, typer.Option(min=0, help="Requests before each turn that are not measured.")
    ] = 2,
    stop_at_eos: Annotated[
        bool,
        typer.Option("--stop-at-eos", help="Let outputs end early; do not send ignore_eos."),
    ] = False,
    output: OutputOption = None,
    json_file: JSONOption = None,
) -> None:
    """Send requests to OpenAI-compatible servers when they are due, however slow the servers are,
    and report latencies, throughput, goodput and errors.

    A key, if the servers want one, is taken from the environment: OPENAI_API_KEY.
    """
    if find_spec("httpx") is None:
        raise PageloomError("the load is sent with httpx: pip install 'pageloom[bench]'")
    from pageloom.bench.http.load import with_prefix_share
    from pageloom.bench.http.report import as_json
    from pageloom.bench.http.run import Settings
    from pageloom.bench.http.slo import parse_slo
    from pageloom.bench.http.target import parse_targets
    from pageloom.bench.http.text import failures, notes, table

    targets, limits = parse_targets(url), parse_slo(slo) if slo is not None else {}
    own = (prompt_tokens, output_tokens, prefix_tokens, prefix_groups)
    load = make_trace(trace, requests, seed, *own)
    if lengths is not None:
        if trace or prompt_tokens or output_tokens:
            raise PageloomError(
                "--lengths says how long all are: leave out --trace, --prompt-tokens and "
                "--output-tokens"
            )
        load = _with_lengths(load, lengths, seed)
    if prefix_share is not None:
        if prefix_tokens is None:
            raise PageloomError("--prefix-share needs --prefix-tokens: how long the prefixes are")
        load = with_prefix_share(load, prefix_share, seed)
    load = _with_arrivals(load, rate, burstiness, seed)
    require_folder_of(json_file)
    if output is not None:
        from pageloom.bench.figures import require_matplotlib

        require_matplotlib()
        make_folder(output)

    def save(report: Report) -> None:
        if json_file is not None:
            data = {"command": sys.argv[1:], **as_json(report)}
            write_file(json_file, json.dumps(data).encode())

    report = _measure(
        targets,
        model,
        _drawn(load, vocab_size, seed, rounds),
        limits,
        Settings(timeout, not stop_at_eos, warm_up),
        save,
    )
    print_table(table(report), [*failures(report), *notes(report)])
    if output is not None:
        _write_page(output, report)
    if not any(run.succeeded for done in report.rounds for run in done.values()):
        raise PageloomError("no request succeeded")


def _with_lengths(load: Trace, name: str, seed: int) -> Trace:
    from pageloom.bench.http.load import with_lengths
    from pageloom.bench.workload import ALPACA, SHAREGPT

    sources = {source.name.lower(): source for source in (SHAREGPT, ALPACA)}
    if name.lower() not in sources:
        raise PageloomError(f"--lengths is {shorten(name)!r}; {suggest(name, sources)}")
    return with_lengths(load, sources[name.lower()], seed)


def _with_arrivals(load: Trace, rate: float | None, burstiness: float | None, seed: int) -> Trace:
    from pageloom.bench.http.load import with_arrivals

    if rate is not None:
        return with_arrivals(load, rate, 1.0 if burstiness is None else burstiness, seed)
    if burstiness is not None:
        raise PageloomError("--burstiness needs --rate: how many requests come per second")
    return load


def _drawn(load: Trace, vocab_size: int, seed: int, rounds: int) -> list[Trace]:
    """A trace per round: random prompts are other ones in each, or a server's prefix cache would
    have all of them from the second on."""
    from pageloom.bench.serving.trace import draw_token_ids

    return [
        draw_token_ids(load, vocab_size, seed if number == 0 else f"{seed} round {number}")
        for number in range(rounds)
    ]


def _measure(
    targets: Sequence[Target],
    model: str | None,
    traces: Sequence[Trace],
    slo: SLO,
    settings: Settings,
    save: Callable[[Report], None],
) -> Report:
    """``save`` is called after each round: all of them may take hours."""
    import asyncio

    from pageloom.bench.http.report import Report
    from pageloom.bench.http.run import named, run_rounds
    from pageloom.bench.machine import Machine, load_average

    async def measure() -> Report:
        found, load, done = await named(targets, model, settings), load_average(), []
        with requests_progress() as progress:
            task = progress.add_task("", total=len(traces) * len(found) * len(traces[0]))

            def say(number: int, target: Target) -> None:
                what = f"round {number + 1} of {len(traces)}, {target.name}"
                progress.update(task, description=what)

            async for finished in run_rounds(
                found,
                traces,
                settings,
                on_turn=say,
                on_finished=lambda: progress.advance(task),
            ):
                done.append(finished)
                machine = Machine.describe(load)
                report = Report(found, traces[0], tuple(done), slo, settings, machine)
                save(report)
        return report

    return asyncio.run(measure())


def _write_page(folder: Path, report: Report) -> None:
    from pageloom.bench.http.figures import draw
    from pageloom.bench.http.page import make_page

    images = draw(report)
    for name, data in images.items():
        write_file(folder / name, data)
    write_file(folder / "index.html", make_page(report).as_html(images).encode())
