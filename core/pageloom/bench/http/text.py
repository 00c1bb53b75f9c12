"""The report as text, which the terminal and the page share."""

from __future__ import annotations

from collections.abc import Iterator

from pageloom.bench.comparison import header, spread_note
from pageloom.bench.http.report import Report, percentile_of
from pageloom.errors import counted

LATE = 0.01  # seconds; what is sent later than this is not the load that was asked for


def table(report: Report) -> list[list[str]]:
    """Cells, the header first."""
    return [header([t.name for t in report.targets]), *(row.cells() for row in report.rows)]


def failures(report: Report) -> Iterator[str]:
    """A sentence for each kind of error of each target, the most frequent first."""
    for target in report.targets:
        failed = [o for run in report.runs(target) for o in run.outcomes if o.error]
        said = {outcome.error: outcome.detail for outcome in reversed(failed)}  # by the first
        for kind, count in report.errors[target.name].most_common():
            detail = f" (the first: {said[kind]})" if said[kind] else ""
            yield f"Failed at {target.name}: {counted(count, 'request')}, {kind}{detail}."


def notes(report: Report) -> Iterator[str]:
    """What one has to know to read the table, one sentence or two each."""
    trace, rounds = report.trace, len(report.rounds)
    outputs = [request.output_tokens for request in trace]
    arriving = f"over {trace[-1].arrival:.1f} s" if trace[-1].arrival else "all at once"
    yield (
        f"Load: {counted(len(trace), 'request')} {arriving}, "
        f"{counted(sum(outputs), 'output token')} ({min(outputs)} to {max(outputs)}), greedy, "
        "streamed from /v1/completions, each sent when it is due however many are open."
    )
    prompts = [len(request.prompt) for request in trace if not isinstance(request.prompt, str)]
    if prompts:
        yield f"Prompts of {min(prompts):,} to {max(prompts):,} token ids, {sum(prompts):,} in all."
    for target in report.targets:
        yield f"{target.name}: {target.url}, model {target.model}."
    values = f"Values are medians over {rounds} rounds" if rounds > 1 else "Values are of one round"
    if len(report.targets) > 1:
        yield (
            f"{values}; behind each server, its ratio to {report.targets[0].name}: above 1 it has "
            "more of it, which is worse for times. Ratios of times are over requests that all "
            "servers answered."
        )
        yield spread_note(rounds)
    else:
        yield f"{values}."
    yield (
        "All times are from when a request was due. TTFT and ITL are of the events that brought "
        "text, which may be of several tokens; TPOT is per token."
    )
    if report.slo:
        limits = ", ".join(f"{name} {limit:g} s" for name, limit in report.slo.items())
        yield f"Goodput: requests that succeeded within {limits}, per second."
    yield from _doubts(report)
    yield f"The load came from: {report.machine}."


def _doubts(report: Report) -> Iterator[str]:
    for target in report.targets:
        late = [o.late for run in report.runs(target) for o in run.outcomes]
        if (worst := percentile_of(late, 99) or 0.0) > LATE:
            yield (
                f"The client was too slow for {target.name}: 1 % of the requests were sent "
                f"{worst:.3f} s or more after they were due (at most {max(late):.3f} s)."
            )
        if uncounted := sum(
            o.prompt_tokens is None for run in report.runs(target) for o in run.succeeded
        ):
            yield (
                f"{target.name} did not say how many tokens {uncounted} of its answers have; their "
                "events were counted instead."
            )
