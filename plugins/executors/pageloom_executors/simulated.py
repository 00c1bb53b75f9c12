"""No model at all: steps take the time that a profile says, on a clock that only they move."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from pageloom.contract import Blueprint, Executor, Step, StepOutput, WorkerError, WorkerReport
from pageloom.contract.costs import StepCosts, StepProfile, StepWork
from pageloom.contract.sizes import bytes_in

# What a worker says of itself where no profile does: enough for a chat of a usual length.
_NOBODY = WorkerReport(
    architecture="none",
    device="simulated",
    dtype="none",
    vocab_size=32_000,
    max_model_len=4096,
    backend="none",
    block_size=16,
    bytes_per_block=1,
    num_blocks=4096,
    host_blocks=0,
    weights={},
    activations=None,
)


class Score(NamedTuple):
    """A made-up log-probability of a given token, with the attributes that the engine reads."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


class SimulatedExecutor(Executor):
    """Starts no worker and loads no weights, so that a configuration's scheduling, limits and
    memory can be tried on any machine, as fast as they are planned.

    Its `clock` is virtual: `submit` moves it by the seconds that the step would have taken, and
    nothing else does. All times that the engine tells are by that clock.

    The tokens are made up: the same in every run, valid, and never a special token, as far as
    those stand where nearly all vocabularies have them, at the beginning and the end. So outputs
    end by their ``max_tokens``. Nothing is known of log-probabilities: draws have none, and
    prompts are scored with 0.
    """

    @dataclass
    class Config:
        profile: str | None = None
        """File that ``pageloom bench profile`` wrote: costs, and all that a model would tell."""
        costs: dict[str, Any] = field(default_factory=dict)
        """Seconds by name, as in a profile; those of the profile where not given. Without
        either, steps take no time."""
        vocab_size: int | None = None
        """Another one than the profile's. Without a profile: 32000."""
        max_model_len: int | None = None
        """Most tokens of prompt and output together. By default ``model.max_model_len``, or else
        the profile's. Without a profile: 4096."""
        num_blocks: int | None = None
        """Blocks that there is room for. By default ``kv_cache.num_blocks``, or those that fit
        into ``kv_cache.memory``, or else the profile's. Without a profile: 4096."""
        block_size: int | None = None
        """Tokens per block. By default ``kv_cache.block_size``, or else the profile's. Without a
        profile: 16."""

        def __post_init__(self) -> None:
            for name in ("vocab_size", "max_model_len", "num_blocks", "block_size"):
                value = getattr(self, name)
                if value is not None and value < 1:
                    raise ValueError(f"{name} must be 1 or more, not {value}")
            StepCosts.from_json(self.costs)

    config: Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._now = 0.0
        self._costs = StepCosts()
        self._report = _NOBODY
        self._tokens: Iterator[int] = iter(())
        self._outputs: deque[StepOutput] = deque()
        self._open = False

    def start(self, blueprint: Blueprint) -> Sequence[WorkerReport]:
        """The costs are those of all ranks, and what they take is all in the first's report."""
        path = self.config.profile
        profile = None if path is None else StepProfile.read(path)
        costs = StepCosts() if profile is None else profile.costs
        self._costs = StepCosts.from_json(costs.as_json() | self.config.costs)
        self._report = _report(self.config, blueprint.state().get("config", {}), profile)
        self._tokens = _made_up(self._report.vocab_size)
        self._open = True
        another = replace(self._report, bytes_per_block=0, weights={}, activations=None)
        return [self._report, *[another] * (blueprint.world_size - 1)]

    def allocate(self, num_blocks: int, host_blocks: int) -> None:
        self._check_open()

    def submit(self, step: Step) -> None:
        self._check_open()
        draws, beams = step.num_draws, step.num_candidates
        work = StepWork.of(step.query_lens, step.seq_lens, draws + len(beams))
        self._now += self._costs.seconds(work)
        self._outputs.append(
            StepOutput(
                token_ids=[next(self._tokens) for _ in range(draws)],
                logprobs=[None] * draws,
                candidates=[self._candidates(count) for count in beams],
                scores=[[Score(0, 0.0, 1, ())] * count for count in step.num_scored],
            )
        )

    def receive(self) -> StepOutput:
        self._check_open()
        return self._outputs.popleft()

    def clock(self) -> float:
        return self._now

    def close(self) -> None:
        self._open = False
        self._outputs.clear()

    def _candidates(self, count: int) -> list[tuple[int, float]]:
        """Different tokens, each half as likely as the one before."""
        first = next(self._tokens)
        size = self._report.vocab_size
        return [((first + i) % size, -0.6931 * (i + 1)) for i in range(count)]

    def _check_open(self) -> None:
        if not self._open:
            raise WorkerError("the simulated executor is not started, or closed")


def _report(
    options: SimulatedExecutor.Config, values: Mapping[str, Any], profile: StepProfile | None
) -> WorkerReport:
    """By the executor's options, or else the configuration's values, by section, or else the
    profile. Raises `ValueError` for values that cannot be honoured."""
    model, cache = values.get("model", {}), values.get("kv_cache", {})
    wanted = cache.get("quantizer")
    if profile is not None:
        profile.check_quantizer(wanted, f"the profile {options.profile}")
    elif wanted is not None:
        raise ValueError(
            f"kv_cache.quantizer is {wanted}, but without a profile the simulated executor "
            "knows of no KV format; set it to null, or give a profile measured with it"
        )
    block_size = options.block_size or cache.get("block_size")
    num_blocks = options.num_blocks or cache.get("num_blocks")
    if profile is None:
        worker = replace(_NOBODY, block_size=block_size or _NOBODY.block_size)
    else:
        worker = profile.worker.in_blocks_of(block_size or profile.worker.block_size)
    if num_blocks is None and cache.get("memory") is not None:
        known = profile is not None and profile.worker.bytes_per_block > 0
        num_blocks = _fitting(cache["memory"], worker.bytes_per_block if known else None)
    report = replace(
        worker,
        vocab_size=options.vocab_size or worker.vocab_size,
        max_model_len=options.max_model_len or model.get("max_model_len") or worker.max_model_len,
        num_blocks=worker.num_blocks if num_blocks is None else num_blocks,
    )
    if report.num_blocks < 1:
        raise ValueError(
            f"no KV block of {report.block_size} tokens fits; raise kv_cache.memory or lower "
            "kv_cache.block_size"
        )
    return report


def _fitting(memory: int | str, bytes_per_block: int | None) -> int:
    """Blocks that fit into ``kv_cache.memory``."""
    if bytes_per_block is None:
        raise ValueError(
            f"kv_cache.memory is {memory}, but no profile says how many bytes a block takes; set "
            "kv_cache.num_blocks instead, or give a profile that does"
        )
    size = bytes_in(memory)
    if size is None:
        raise ValueError(f"kv_cache.memory is {memory}, which is not a size such as 4GiB")
    return size // bytes_per_block


def _made_up(vocab_size: int) -> Iterator[int]:
    """Token ids from the middle half of the vocabulary, again and again."""
    low = vocab_size // 4
    span = max(1, vocab_size // 2)
    position = 0
    while True:
        yield low + position % span
        position += 7919  # a prime: neighbours are far apart
