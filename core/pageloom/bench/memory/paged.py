"""vLLM's part: blocks that are handed out as requests grow, by the control plane of this engine."""

from __future__ import annotations

from collections.abc import Sequence

from pageloom.bench.memory import paper
from pageloom.bench.memory.served import KV_SLOTS
from pageloom.bench.memory.settings import Settings
from pageloom.bench.memory.usage import Iteration, Usage
from pageloom.bench.workload import MAX_MODEL_LEN, Arrival, Lengths
from pageloom.errors import PageloomError
from pageloom.memory import blocks_for
from pageloom.scheduling import Request, RequestTooLargeError, SamplingParams
from pageloom.scheduling.plan import StepPlan
from pageloom.scheduling.simulation import Simulation


class Paged(Simulation):
    """The real planner, block pool and policy, with the paper's KV memory.

    Prefix caching is off, as the paper's vLLM had none (and prompts here are all the same).
    """

    def __init__(self, settings: Settings) -> None:
        self.now = 0.0
        super().__init__(
            settings.policy.new_scheduler(),
            num_blocks=settings.num_blocks,
            block_size=settings.block_size,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_model_len=MAX_MODEL_LEN,
            enable_chunked_prefill=settings.enable_chunked_prefill,
            enable_prefix_caching=False,
            preemption_mode=settings.preemption_mode,
            host_blocks=settings.host_blocks,
            clock=lambda: self.now,
        )
        self.block_size = settings.block_size


class PagedSystem:
    """A `Paged` simulation as a system to `serve` with. Requests have one branch each."""

    def __init__(self, settings: Settings) -> None:
        self.slots = KV_SLOTS
        self._simulation = Paged(settings)
        self._added = 0

    @property
    def busy(self) -> bool:
        return self._simulation.planner.has_requests

    def add(self, arrival: Arrival) -> None:
        self._simulation.add(new_request(str(self._added), arrival.lengths, at=arrival.time))
        self._added += 1

    def step(self, now: float) -> Iteration:
        self._simulation.now = now
        planner = self._simulation.planner
        if not planner.has_requests:
            return Iteration(self._usage(StepPlan(()), ()), 0, 0, 0, 0)
        plan, finished = self._simulation.step()
        return Iteration(
            self._usage(plan, finished),
            requests=len(plan.chunks),
            prefills=sum(not chunk.is_decode for chunk in plan.chunks),
            tokens=plan.num_tokens,
            waiting=len(planner.waiting),
        )

    def _usage(self, plan: StepPlan, finished: Sequence[Request]) -> Usage:
        """As the plan ran; what it finished has given its blocks back since."""
        planner, size = self._simulation.planner, self._simulation.block_size
        ended = [chunk.stop for chunk in plan.chunks if chunk.branch.request in finished]
        tokens = planner.kv_tokens(plan) + sum(ended)
        held = planner.pool.num_used + sum(blocks_for(stop, size) for stop in ended)
        return Usage(
            token_states=tokens,
            reserved=0,
            internal=held * size - tokens,
            rounding=0,
            free=self.slots - held * size,
        )


def new_request(
    name: str, lengths: Lengths, *, at: float = 0.0, n: int = 1, beam_width: int | None = None
) -> Request:
    params = SamplingParams(
        n=n, beam_width=beam_width, temperature=0.0, max_tokens=lengths.output_tokens
    )
    return Request(name, [0] * lengths.prompt_tokens, params, arrival_time=at)


def check_fit(settings: Settings) -> None:
    """Raise `PageloomError` unless the largest request of the paper's experiments can run."""
    width = max(paper.WIDTHS)
    needed = width * blocks_for(MAX_MODEL_LEN, settings.block_size)
    if needed > settings.num_blocks:
        raise PageloomError(
            f"kv_cache.block_size is {settings.block_size}, but the paper's KV memory holds only "
            f"{settings.num_blocks} such blocks, and {width} beams of {MAX_MODEL_LEN} tokens may "
            f"need {needed}; lower it"
        )
    largest = new_request("largest", Lengths(1, MAX_MODEL_LEN - 1), beam_width=width)
    try:
        Paged(settings).add(largest)
    except RequestTooLargeError as error:
        raise PageloomError(
            f"the paper's largest request does not fit into this configuration: {error}"
        ) from error
