"""Time passes: requests arrive and are routed, and every replica runs step after step."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

from pageloom.bench.simulate.load import Load
from pageloom.bench.simulate.meter import Log, Measured, Meter
from pageloom.bench.simulate.replica import Replica
from pageloom.bench.simulate.routing import ROUTERS
from pageloom.bench.simulate.settings import Settings
from pageloom.errors import PageloomError
from pageloom.scheduling import PolicyError, RequestTooLargeError

REPORTED_EVERY = 500  # requests


def simulate(
    settings: Settings,
    load: Load,
    *,
    replicas: int = 1,
    routing: str = "round_robin",
    window: float = 60.0,
    part: int = 0,
    parts: int = 1,
    on_arrivals: Callable[[int], None] = lambda count: None,
) -> Measured:
    """Serve ``load`` with so many replicas of an engine.

    With ``parts`` above 1, only every so many-th replica is simulated, beginning with ``part``;
    that needs a routing that is `Router.independent`, and the parts are merged. ``on_arrivals`` is
    told now and then how many requests have arrived since it was last. Raises `PageloomError`.
    """
    log = Log(list(load.tenants), window)
    everyone = [Replica(settings, Meter(log)) for _ in range(replicas)]
    router = ROUTERS[routing](everyone, load, settings.limits.block_size)
    if parts > 1 and not router.independent:
        raise ValueError(f"{routing} needs to see all replicas")
    try:
        _run(everyone, router.choose, load, log, part, parts, on_arrivals)
    except (PolicyError, RequestTooLargeError) as error:
        raise PageloomError(f"{settings.name}: {error}") from error
    return log.result()


def _run(
    replicas: list[Replica],
    choose: Callable[..., int],
    load: Load,
    log: Log,
    part: int,
    parts: int,
    on_arrivals: Callable[[int], None],
) -> None:
    # When each replica that is not idle will plan its next step.
    steps: list[tuple[float, int]] = []
    tenants, reported = load.tenants, 0
    for number, asked in enumerate(load):
        if number - reported == REPORTED_EVERY:
            on_arrivals(number - reported)
            reported = number
        if parts > 1 and number % len(replicas) % parts != part:
            continue
        arrival = asked.arrival
        while steps and steps[0][0] < arrival:
            _step(replicas, steps)
        prompt = load.prompt(number, asked)
        index = choose(number, asked, prompt)
        replica, tenant = replicas[index], tenants[asked.tenant]
        was_idle = replica.idle
        replica.meter.passes(arrival)
        if not replica.add(number, asked, prompt, tenant):
            log.rejected[tenant] += 1
        elif was_idle:
            heappush(steps, (arrival, index))  # to begin once all who come now are there
    while steps:
        _step(replicas, steps)
    on_arrivals(len(load) - reported)


def _step(replicas: list[Replica], steps: list[tuple[float, int]]) -> None:
    """The first step that ends, if it had begun, and the start of the next of its replica."""
    now, index = heappop(steps)
    replica = replicas[index]
    replica.meter.passes(now)
    replica.end(now)
    if not replica.idle:
        heappush(steps, (now + replica.begin(now), index))
