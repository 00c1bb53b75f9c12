"""``pageloom bench simulate``: policies and configurations in virtual time, without a model."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pageloom.commands.comparing import first_of_trace, print_table, requests_progress
from pageloom.commands.files import make_folder, require_folder_of, write_file
from pageloom.commands.options import (
    OWN,
    BurstinessOption,
    ConfigsArgument,
    JSONOption,
    LengthsOption,
    OutputOption,
    OutputTokensOption,
    PrefixGroupsOption,
    PrefixShareOption,
    PrefixTokensOption,
    PromptTokensOption,
    SetOption,
    SLOOption,
    TraceOption,
)
from pageloom.errors import PageloomError, shorten, suggest

if TYPE_CHECKING:
    from pageloom.bench.simulate.load import Load, Mix
    from pageloom.bench.simulate.report import Report
    from pageloom.bench.simulate.run import Cluster, Outcome
    from pageloom.bench.simulate.settings import Settings
    from pageloom.bench.workload import LengthSource

DEFAULT_REQUESTS = 10_000


def simulate(
    configs: ConfigsArgument,
    overrides: SetOption,
    policy: Annotated[
        str | None,
        typer.Option(metavar="A,B,...", help="Compare these schedulers on the one CONFIG."),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Of bench profile. Default: the one CONFIG names."),
    ] = None,
    requests: Annotated[
        int | None, typer.Option(min=1, help="How many; default 10000, or all of --trace.")
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(help="Arrivals per second. Default: as in --trace, or 80 % of the capacity."),
    ] = None,
    burstiness: BurstinessOption = None,
    trace: TraceOption = None,
    seed: Annotated[int, typer.Option(min=0, help="Of whatever is random.")] = 0,
    lengths: LengthsOption = None,
    prompt_tokens: PromptTokensOption = None,
    output_tokens: OutputTokensOption = None,
    prefix_tokens: PrefixTokensOption = None,
    prefix_groups: PrefixGroupsOption = None,
    prefix_share: PrefixShareOption = None,
    tenants: Annotated[
        int, typer.Option(min=1, help=OWN + "who send requests, the n-th 1/n as many as the first.")
    ] = 1,
    priorities: Annotated[
        int, typer.Option(min=1, help=OWN + "levels of priority, alike frequent.")
    ] = 1,
    replicas: Annotated[int, typer.Option(min=1, max=10_000, help="Engines of each CONFIG.")] = 1,
    routing: Annotated[
        str, typer.Option(help="To which replica: round_robin, least_loaded or prefix.")
    ] = "round_robin",
    window: Annotated[
        float, typer.Option(min=0.001, help="Seconds over which tenants' shares are compared.")
    ] = 60.0,
    slo: SLOOption = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="At the same time; default one per core.")
    ] = None,
    output: OutputOption = None,
    json_file: JSONOption = None,
) -> None:
    """Compare schedulers or configs under load, in virtual time: real plans, no model.

    Steps take as long as a profile of `pageloom bench profile` says. A million requests take
    minutes to some tens of minutes. A request is refused where a server would: when
    server.max_waiting others wait.
    """
    from pageloom.bench.simulate.report import Report, as_json, notes
    from pageloom.bench.simulate.routing import ROUTERS
    from pageloom.bench.simulate.run import Cluster

    require_folder_of(json_file)
    if output is not None:
        from pageloom.bench.figures import require_matplotlib

        require_matplotlib()
        make_folder(output)
    if routing not in ROUTERS:
        raise PageloomError(f"--routing is {shorten(routing)!r}; {suggest(routing, ROUTERS)}")
    limits = _slo(slo)
    settings, source = _settings(configs, overrides, policy, profile)
    cluster = Cluster(replicas, routing, window)
    if trace is not None:
        own = (lengths, prompt_tokens, output_tokens, prefix_tokens, prefix_groups, prefix_share)
        if any(value is not None for value in own) or tenants + priorities > 2:
            raise PageloomError(
                "--trace has requests of its own: leave out --lengths, --prompt-tokens, "
                "--output-tokens, --prefix-tokens, --prefix-groups, --prefix-share, --tenants and "
                "--priorities"
            )
        from pageloom.bench.simulate.load import trace_load

        load = trace_load(first_of_trace(trace, requests), trace)
    else:
        from pageloom.bench.simulate.load import random_load

        mix = _mix(
            _lengths(lengths, prompt_tokens, output_tokens),
            tenants,
            priorities,
            prefix_tokens,
            prefix_groups,
            prefix_share,
        )
        load = random_load(mix, requests or DEFAULT_REQUESTS, seed)
    for one in settings:
        one.check(load)
    load = _arriving(load, rate, burstiness, seed, settings[0], cluster, trace is not None)
    report = Report(
        _run(settings, load, cluster, processes or _cores()), load, cluster, source, limits
    )
    _print(report, list(notes(report)))
    if json_file is not None:
        data = {"command": sys.argv[1:], **as_json(report)}
        write_file(json_file, json.dumps(data, indent=1).encode())
    if output is not None:
        _write_page(output, report)


def _settings(
    configs: list[str], overrides: list[str], policy: str | None, profile: str | None
) -> tuple[list[Settings], str]:
    """Those to compare, and the name of the profile."""
    from pageloom.bench.simulate.settings import profile_of, settings_from
    from pageloom.config import load_config

    if policy is None:
        names = [Path(path).stem for path in configs]
        if len(set(names)) < len(names):
            names = [f"{path} ({number})" for number, path in enumerate(configs, 1)]
        wanted = [(name, path, overrides) for name, path in zip(names, configs, strict=True)]
    else:
        if len(configs) > 1:
            raise PageloomError(f"--policy needs one CONFIG to change, not {len(configs)}")
        chosen = list(dict.fromkeys(name.strip() for name in policy.split(",")))
        wanted = [(name, configs[0], [*overrides, f"scheduler.policy={name}"]) for name in chosen]
    settings, sources = [], []
    for name, path, changes in wanted:
        config = load_config(path, changes)
        found = profile_of(config, profile)
        settings.append(settings_from(config, found, name))
        sources.append(str(profile or config.parallel.options["profile"]))
    return settings, ", ".join(dict.fromkeys(sources))


def _slo(text: str | None) -> dict[str, float]:
    if text is None:
        return {}
    try:
        from pageloom.bench.http.slo import parse_slo
    except ImportError as error:
        raise PageloomError(
            f"{error.name} is not installed, which --slo needs: pip install 'pageloom[bench]'"
        ) from error
    return dict(parse_slo(text))


def _lengths(name: str | None, prompt: str | None, output: str | None) -> LengthSource:
    from pageloom.bench.serving.trace import parse_span
    from pageloom.bench.simulate.load import UniformLengths
    from pageloom.bench.workload import ALPACA, SHAREGPT

    if name is None:
        return UniformLengths(
            parse_span(prompt or "50:500", "--prompt-tokens"),
            parse_span(output or "16:200", "--output-tokens"),
        )
    if prompt or output:
        raise PageloomError(
            "--lengths says how long all are: leave out --prompt-tokens and --output-tokens"
        )
    sources = {source.name.lower(): source for source in (SHAREGPT, ALPACA)}
    if name.lower() not in sources:
        raise PageloomError(f"--lengths is {shorten(name)!r}; {suggest(name, sources)}")
    return sources[name.lower()]


def _mix(
    lengths: LengthSource,
    tenants: int,
    priorities: int,
    prefix_tokens: int | None,
    prefix_groups: int | None,
    prefix_share: float | None,
) -> Mix:
    from pageloom.bench.simulate.load import Mix

    if prefix_tokens is None and (prefix_groups or prefix_share is not None):
        raise PageloomError(
            "--prefix-groups and --prefix-share need --prefix-tokens: how long the prefixes are"
        )
    share = 1.0 if prefix_share is None else prefix_share
    return Mix(lengths, tenants, priorities, prefix_tokens or 0, prefix_groups or 1, share)


def _arriving(
    load: Load,
    rate: float | None,
    burstiness: float | None,
    seed: int,
    first: Settings,
    cluster: Cluster,
    traced: bool,
) -> Load:
    from pageloom.bench.simulate.load import with_arrivals
    from pageloom.bench.simulate.run import sustained_rate

    if rate is None:
        if traced and burstiness is not None:
            raise PageloomError("--burstiness needs --rate: how many requests come per second")
        if traced:
            return load
        rate = sustained_rate(first, load, cluster)
    return with_arrivals(load, rate, 1.0 if burstiness is None else burstiness, seed)


def _run(
    settings: Sequence[Settings], load: Load, cluster: Cluster, processes: int
) -> list[Outcome]:
    from pageloom.bench.simulate.run import run_all

    with requests_progress() as progress:
        tasks = [progress.add_task(one.name, total=len(load)) for one in settings]

        def show(arrived: Sequence[int]) -> None:
            for task, count in zip(tasks, arrived, strict=True):
                progress.update(task, completed=count)

        return run_all(settings, load, cluster, processes, show)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _print(report: Report, notes: list[str]) -> None:
    from pageloom.bench.comparison import header

    print_table([header(report.names), *(row.cells() for row in report.rows)], notes)


def _write_page(folder: Path, report: Report) -> None:
    from pageloom.bench.simulate.figures import draw
    from pageloom.bench.simulate.page import make_page

    images = draw(report)
    for name, data in images.items():
        write_file(folder / name, data)
    write_file(folder / "index.html", make_page(report).as_html(images).encode())
