"""What a configuration does to the model's predictions: perplexity, and divergence from a baseline.

Everything is computed by the engine as it would serve the text: planned by its scheduler, chunk by
chunk, over its KV cache. So a lossy cache, or a backend that computes less exactly, shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist

import numpy as np
import torch
import torch.nn.functional as F

from pageloom.bench.statistics import CONFIDENCE
from pageloom.engine.engine import Engine
from pageloom.engine.planned import PlannedStep
from pageloom.errors import PageloomError
from pageloom.runner.runner import NAN
from pageloom.scheduling import Request, SamplingParams

WINDOW = 512
"""Most tokens that are scored in one piece. Each window begins anew, with nothing before it."""
DEFAULT_TOKENS = 4096
# Rows of logits held at once, for the baseline and for another.
ROWS = 128


@dataclass(frozen=True)
class Sample:
    """A text to measure on, of which the first ``most_tokens`` are taken."""

    source: str
    text: str = field(repr=False)
    most_tokens: int = DEFAULT_TOKENS

    @classmethod
    def load(cls, file: Path | None, most_tokens: int = DEFAULT_TOKENS) -> Sample:
        """The text of ``file``, or by default the help texts on Python's language that are part
        of every Python (``pydoc_data.topics``). Those differ between versions of Python, so
        their perplexity compares within one. Raises `PageloomError` for what cannot be read."""
        if file is None:
            from pydoc_data.topics import topics

            return cls(
                "pydoc_data.topics", "\n".join(topics[name] for name in sorted(topics)), most_tokens
            )
        try:
            return cls(str(file), file.read_text(encoding="utf-8-sig"), most_tokens)
        except (OSError, UnicodeDecodeError) as error:
            raise PageloomError(f"the text {file} cannot be read: {error}") from error


@dataclass(frozen=True, slots=True)
class PerplexityRatio:
    value: float
    low: float
    high: float
    """A 95 percent interval of what more text of this kind would give: normal, of the mean over
    tokens of the difference in log-likelihood, in which what makes a token hard cancels out."""

    @classmethod
    def of(cls, losses: torch.Tensor, baseline: torch.Tensor) -> PerplexityRatio:
        """From negative log-likelihoods of the same tokens, float64 ``[N]``."""
        differences = losses - baseline
        error = float(differences.std(correction=0)) / math.sqrt(len(differences))
        mean, around = float(differences.mean()), NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * error
        value, low, high = np.exp([mean, mean - around, mean + around])
        return cls(float(value), float(low), float(high))


@dataclass(frozen=True)
class Quality:
    """What was measured, by the engine's name; the first is the baseline."""

    source: str
    scored_tokens: int
    window: int  # most tokens in one piece
    perplexity: Mapping[str, float]  # exp of the mean negative log-likelihood, in nats
    perplexity_ratio: Mapping[str, PerplexityRatio]  # to the baseline
    kl_divergence: Mapping[str, float]
    """Mean over positions of KL(baseline || engine) between next-token distributions, in nats."""


def perplexity(
    path: str | Path, overrides: Sequence[str] = (), sample: Sample | None = None
) -> float:
    """The perplexity of the model that a YAML file describes, on ``sample`` or the default text.

    Raises `PageloomError` as `Engine.from_config` and `measure_quality` do.
    """
    name = str(path)
    engines = {name: Engine.from_config(path, overrides)}
    return measure_quality(engines, sample or Sample.load(None)).perplexity[name]


@torch.inference_mode()
def measure_quality(
    engines: Mapping[str, Engine],
    sample: Sample,
    on_window: Callable[[int, int], None] = lambda number, of: None,
) -> Quality:
    """Score a text by every engine, window by window, so that little is held at a time.

    The engines, by name, must be idle and have the same tokenizer and vocabulary; the first is the
    baseline. A window has `WINDOW` tokens, or as many as the shortest ``max_model_len`` allows,
    and begins with the token that the tokenizer puts before a text, if any. Of each window the
    first token is only given, all others are scored. ``on_window`` is told how many windows are
    done, and of how many.

    Raises `PageloomError` that names the engine at fault, or what is wrong with the text, and
    `ValueError` for an engine that is not idle.
    """
    if busy := [name for name, engine in engines.items() if engine.has_requests]:
        raise ValueError(f"{busy[0]} has open requests; quality is measured on an idle engine")
    windows = _cut(engines, sample)
    baseline, *others = engines
    losses: dict[str, list[torch.Tensor]] = {name: [] for name in engines}
    divergences = dict.fromkeys(engines, 0.0)
    for number, window in enumerate(windows):
        on_window(number, len(windows))
        hidden = {name: _hidden_states(name, engines[name], window) for name in engines}
        for start in range(0, len(window) - 1, ROWS):
            stop = min(start + ROWS, len(window) - 1)
            following = torch.tensor(window[start + 1 : stop + 1])
            expected = _log_probs(baseline, engines[baseline], hidden[baseline][start:stop])
            losses[baseline].append(_losses(expected, following))
            for name in others:
                found = _log_probs(name, engines[name], hidden[name][start:stop])
                losses[name].append(_losses(found, following))
                divergences[name] += kl_divergence(expected, found.to(expected.device))
    on_window(len(windows), len(windows))
    all_losses = {name: torch.cat(parts) for name, parts in losses.items()}
    scored = len(all_losses[baseline])
    return Quality(
        source=sample.source,
        scored_tokens=scored,
        window=max(map(len, windows)),
        perplexity={name: float(loss.mean().exp()) for name, loss in all_losses.items()},
        perplexity_ratio={
            name: PerplexityRatio.of(all_losses[name], all_losses[baseline]) for name in others
        },
        kl_divergence={name: total / scored for name, total in divergences.items()},
    )


def kl_divergence(expected: torch.Tensor, found: torch.Tensor) -> float:
    """The sum over rows of KL(expected || found), in nats, from log-probabilities ``[N, V]``.

    What ``expected`` holds impossible adds nothing.
    """
    difference = (expected - found).masked_fill_(expected.isneginf(), 0)
    return float(difference.mul_(expected.exp()).sum(1).double().sum())


def _losses(log_probs: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """The negative log-likelihood of one token per row, float64 ``[N]`` on the CPU."""
    losses = F.nll_loss(log_probs, token_ids.to(log_probs.device), reduction="none")
    return losses.double().cpu()


def _cut(engines: Mapping[str, Engine], sample: Sample) -> list[list[int]]:
    """The windows, of token ids that are right for every engine."""
    tokenized = {name: _tokenize(name, engine, sample) for name, engine in engines.items()}
    (baseline, (first, token_ids)), *others = tokenized.items()
    size = engines[baseline].vocab_size
    for name, tokens in others:
        if tokens != (first, token_ids):
            raise PageloomError(
                f"{name} and {baseline} make different tokens of {sample.source}, so what they "
                "predict cannot be compared; give configs of models with the same tokenizer"
            )
        if (other := engines[name].vocab_size) != size:
            raise PageloomError(
                f"{name} predicts {other} tokens and {baseline} {size}, so their distributions "
                "cannot be compared; give configs of models with the same vocabulary"
            )
    # Planned as a request, a window must leave room for one output token.
    longest = min(WINDOW, *(engine.info.max_model_len - 1 for engine in engines.values()))
    step = longest - len(first)
    if step < 1 or len(token_ids) + len(first) < 2:
        raise PageloomError(
            f"{sample.source} gives nothing to score: it takes 2 tokens, and there are "
            f"{len(token_ids)} in windows of at most {longest}"
        )
    pieces = [token_ids[at : at + step] for at in range(0, len(token_ids), step)]
    return [window for piece in pieces if len(window := first + piece) > 1]


def _tokenize(name: str, engine: Engine, sample: Sample) -> tuple[list[int], list[int]]:
    """The token that comes before every text, if any, and the text's own."""
    if engine.tokenizer is None:
        raise PageloomError(
            f"{name} has no tokenizer, and quality is measured on a text; set model.tokenizer"
        )
    # Not `Engine.encode`, which refuses what is longer than one request may be.
    tokenizer = engine.tokenizer
    token_ids = tokenizer.encode(sample.text, add_special_tokens=False, verbose=False)
    first = [tokenizer.bos_token_id]
    return (first if tokenizer.encode("")[:1] == first else []), token_ids[: sample.most_tokens]


def _hidden_states(name: str, engine: Engine, window: list[int]) -> torch.Tensor:
    """The final hidden states of a window, ``[len(window), hidden_size]``, as the engine computes
    them in however many steps."""
    planner = engine.planner
    steps: dict[int, torch.Tensor] = {}  # by the position of the first token
    # That prompt logprobs are asked for keeps the prefix cache from leaving tokens out, and nobody
    # else has this salt.
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    request = Request("quality", window, params, arrival_time=planner.clock(), cache_salt="quality")
    try:
        planner.add(request)
    except ValueError as error:
        raise PageloomError(f"{name} cannot score {len(window)} tokens: {error}") from error
    try:
        (branch,) = request.branches
        while branch.num_computed < len(window):
            plan = planner.plan()
            computed = engine.runner.compute(PlannedStep(plan).step)
            if computed is not None:
                _, states = computed
                (chunk,) = plan.chunks
                steps[chunk.start] = states.clone()
                planner.advance(chunk)
    finally:
        planner.finish(request, "abort")
    return torch.cat([steps[start] for start in sorted(steps)])


def _log_probs(name: str, engine: Engine, hidden: torch.Tensor) -> torch.Tensor:
    log_probs = engine.runner.model.logits(hidden).log_softmax(1)
    if log_probs.isnan().any():
        raise PageloomError(f"{name} cannot score the text: {NAN}")
    return log_probs
