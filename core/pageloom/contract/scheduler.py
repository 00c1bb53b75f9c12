"""Scheduling policies.

A scheduler is a pure planner. Once per engine step it reads a view of the requests and fills in
a plan. The plan enforces the token budget, the seats and the blocks, so a bad policy can be slow
or unfair but cannot corrupt memory or exceed a limit.

A whole plugin, two files. ``pyproject.toml``::

    [project]
    name = "pageloom-lifo"
    version = "0.1"
    dependencies = ["pageloom"]

    [project.entry-points.pageloom]
    lifo = "pageloom_lifo"

``pageloom_lifo.py``::

    from pageloom.contract import Scheduler, hookimpl

    contract_version = "1.0"

    @hookimpl
    def register_schedulers(register):
        register("lifo", "pageloom_lifo:LastInFirstOut")

    class LastInFirstOut(Scheduler):
        def schedule(self, view, plan):
            for request in view.running:
                while (
                    plan.preemptible(request) and not plan.run(request) and plan.refusal == "blocks"
                ):
                    plan.preempt(next(r for r in reversed(view.running) if plan.preemptible(r)))
            for request in reversed(list(view.waiting)):
                if not plan.run(request):
                    break

Then ``scheduler: {policy: lifo}`` in the YAML.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, Protocol

from pageloom.contract.component import Component

Refusal = Literal["tokens", "seats", "blocks"]


class RequestView(Protocol):
    """What a policy may know of a request. Read-only; valid until the request finishes.

    The same object stands for a request in every step, so it may be a dictionary key; it is one a
    last time in `SchedulerView.finished`. Token counts are summed over the request's branches
    where branches differ.
    """

    @property
    def request_id(self) -> str: ...
    @property
    def arrival_time(self) -> float:
        """Seconds, on the clock of `SchedulerView.now`."""

    @property
    def priority(self) -> int:
        """Given by the client; lower runs earlier, 0 by default."""

    @property
    def user(self) -> str:
        """The tenant that the client named, or ``""``."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Whatever else the caller attached, such as a deadline. Never interpreted by the core."""

    @property
    def num_branches(self) -> int:
        """Seats that the request takes: its branches, or how many it will have once its prompt is
        computed; more than 1 with parallel sampling or beams."""

    @property
    def prompt_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were found in the prefix cache so far; what a preempted request finds
        again does not count."""

    @property
    def computed_tokens(self) -> int:
        """Tokens whose KV is in blocks now. 0 while waiting."""

    @property
    def output_tokens(self) -> int: ...
    @property
    def max_tokens(self) -> int:
        """Most output tokens that the request may still reach in total, per branch."""

    @property
    def pending_tokens(self) -> int:
        """Tokens known but not computed: what one step could run if nothing limited it.

        A decoding request has one per branch; a request in prefill has the rest of its prompt; a
        preempted one has its prompt and everything that it has generated, unless it was swapped
        out. What `PlanView.run` finds in the prefix cache is pending until then, and not granted.
        """

    @property
    def is_prefill(self) -> bool:
        """Whether more than the newest token of each branch is pending."""

    @property
    def preemptions(self) -> int: ...


class SchedulerView(Protocol):
    """The requests at the start of a step. Valid during one `Scheduler.schedule` call."""

    @property
    def now(self) -> float:
        """Seconds on a monotonic clock, or on the simulator's clock."""

    @property
    def running(self) -> Sequence[RequestView]:
        """Requests that hold blocks, in the order they were admitted."""

    @property
    def waiting(self) -> Collection[RequestView]:
        """Preempted requests, the latest preempted first, then the queue in order of arrival.

        Iterate lazily where you can: the queue may hold hundreds of thousands.
        """

    @property
    def arrived(self) -> Sequence[RequestView]:
        """Requests that came since the last call, in order of arrival.

        With `finished`, all that a policy needs to keep the waiting requests in an order of its
        own, instead of sorting them in every step.
        """

    @property
    def finished(self) -> Sequence[RequestView]:
        """Requests that ended since the last call for whatever reason, waiting ones included.

        One that came and ended between two calls is in neither. What the client gave can still be
        read during this call; token counts mean nothing any more.
        """


class PlanView(Protocol):
    """The step being planned. Valid during one `Scheduler.schedule` call."""

    @property
    def tokens_left(self) -> int:
        """What is left of ``max_num_batched_tokens``."""

    @property
    def seats_left(self) -> int:
        """What is left of ``max_num_seqs``; one seat per branch of a running request."""

    @property
    def block_size(self) -> int:
        """Tokens per block."""

    @property
    def blocks_free(self) -> int:
        """Blocks that nobody holds now, cached prefixes included; grants of this plan are already
        taken off."""

    @property
    def refusal(self) -> Refusal | None:
        """What the last `run` that returned 0 lacked; None after one that was granted."""

    def run(
        self, request: RequestView, max_tokens: int | None = None, spare_blocks: int = 0
    ) -> int:
        """Run up to ``max_tokens`` pending tokens of the request in this step.

        Returns how many were granted, or 0 when none were, and says why in `refusal`. A prefill
        is cut to the tokens left (a chunk) if ``enable_chunked_prefill`` is on, otherwise it is
        granted whole, if ``max_tokens`` and the tokens left allow it, or not at all. A decode is
        granted for all branches or not at all. Tokens whose KV is in the prefix cache are passed
        over first, and are no part of the grant. Blocks are granted for the whole chunk or not at
        all, so pass ``max_tokens`` to try a smaller one; and only if ``spare_blocks`` stay free, so
        that an admission leaves room for requests that already run to grow.

        A waiting request is admitted by its first grant. Raises `ValueError` when the request
        already ran or was preempted in this plan, is not one of the view, or ``max_tokens`` is
        less than 1; and after ``schedule`` has returned.
        """

    def preempt(self, request: RequestView) -> None:
        """Take a running request's blocks and put it at the head of the waiting ones.

        Its tokens are kept. Their KV is computed again later, or comes back from the host when the
        request runs again, as ``preemption_mode`` says. Raises `ValueError` unless `preemptible`
        is true.
        """

    def preemptible(self, request: RequestView) -> bool:
        """Whether the request is running and has neither run nor been preempted in this plan."""


class Scheduler(Component, ABC):
    """A policy: which requests run, how many tokens each, and which give way.

    One instance serves one engine and may keep state between steps. It is called from the
    engine's thread only, never while another call is under way. It must be deterministic in the
    views it was given: no clock but ``view.now``, no unseeded randomness.
    """

    @abstractmethod
    def schedule(self, view: SchedulerView, plan: PlanView) -> None:
        """Fill in ``plan`` from ``view``.

        Must make progress. A policy that neither runs nor preempts anything while requests are
        there, or that preempts and readmits in circles, is stopped and reported by name; so is one
        that raises. Every open request then ends with an error.
        """
