"""Fair shares for tenants."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from pageloom.contract import RequestView
from pageloom_schedulers.policy import Policy
from pageloom_schedulers.tenants import TenantQueue


class Fair(Policy):
    """Admits the earliest request of the tenant that was served least: the virtual token counter
    of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), algorithm 2.

    A tenant is what requests name as ``user``. Its counter grows by ``input_weight`` for each
    prompt token when a request is admitted, those in the prefix cache excepted, and by
    ``output_weight`` for each output token when it is drawn; what is computed again after a
    preemption is free. When a tenant that has nothing waiting sends a request, its counter is
    lifted to the lowest of the tenants that do (if there are none, to that of the last that did),
    so that nobody saves up shares while idle.

    Two tenants that always have requests waiting are served alike: as the paper proves in section
    4, their counters differ by no more than the larger of ``input_weight * L`` and
    ``output_weight * M``, for prompts of at most L tokens and M tokens of running requests. Ageing
    adds to that: a tenant's counter is compared as if it were ``ageing_tokens_per_second`` lower
    for each second that its first request waits. Without it, a tenant could starve behind an
    endless row of new ones, who all start as low as the lowest.
    """

    @dataclass
    class Config(Policy.Config):
        input_weight: float = 1.0
        """What a prompt token costs."""
        output_weight: float = 2.0
        """What an output token costs; the default is the paper's."""
        ageing_tokens_per_second: float = 10.0
        """What a tenant's counter is lowered by for each second that its first request waits."""

        def __post_init__(self) -> None:
            for name in ("input_weight", "output_weight", "ageing_tokens_per_second"):
                if not 0 < (value := getattr(self, name)) < inf:
                    raise ValueError(f"{name} must be more than 0 and finite, not {value}")

    config: Config
    queue: TenantQueue

    def make_queue(self) -> TenantQueue:
        return TenantQueue(self.config.ageing_tokens_per_second)

    def admitted(self, request: RequestView) -> None:
        super().admitted(request)
        if not request.preemptions:
            computed = request.prompt_tokens - request.cached_tokens
            self.queue.charge(request.user, self.config.input_weight * computed)

    def served(self, request: RequestView, tokens: int) -> None:
        if tokens == request.pending_tokens:  # nothing else is pending: every branch draws
            self.queue.charge(request.user, self.config.output_weight * request.num_branches)
