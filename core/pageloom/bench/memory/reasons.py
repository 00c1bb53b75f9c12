"""Why a number differs from the paper's: computed where it can be, otherwise what is not known."""

from __future__ import annotations

from pageloom.bench.memory import paper
from pageloom.bench.memory.experiments import EARLIER, Results, Sharing
from pageloom.bench.memory.served import KV_SLOTS
from pageloom.bench.memory.settings import Settings
from pageloom.bench.workload import RecordedLengths


class Reasons:
    """One method per figure: what makes its numbers differ if they do, as sentences."""

    def __init__(self, settings: Settings, results: Results) -> None:
        self._settings = settings
        self._results = results

    def memory(self, system: str) -> list[str]:
        if system == paper.PAGED:
            waiting = self._results.serving[paper.SHAREGPT, system].waiting
            load = (
                f"ShareGPT requests waited for memory or a seat in {waiting:.0%} of the time; in "
                "the rest there was no need for more memory."
            )
            return [*self._deviations(), load]
        return [
            self._lengths(paper.SHAREGPT),
            "The buddy allocator hands out powers of two, so what a region wastes is decided by "
            "where the sums of prompt and output lie between them.",
        ]

    def batched(self, workload: str, system: str) -> list[str]:
        if system != paper.PAGED:
            return [self._lengths(workload)]
        measured = self._results.serving[workload, system]
        if measured.waiting < 0.5:
            return [
                *self._deviations(),
                f"Memory was not the limit: {workload} requests waited in {measured.waiting:.0%} "
                "of the time. So by Little's law the number is their rate times the time that one "
                f"takes, and says how long a step is: {measured.step_seconds * 1e3:.0f} ms here. "
                "Near the capacity, a little more time per step makes many more requests.",
            ]
        tokens = measured.shares["token_states"].mean * KV_SLOTS / measured.requests.mean
        if workload != paper.SHAREGPT:
            held = f"Memory was the limit: a request held {tokens:.0f} tokens on average."
            return [*self._deviations(), held, self._lengths(workload)]
        return [
            *self._deviations(),
            f"Memory is full, so the number says how many tokens a request holds: {tokens:.0f} "
            f"here, {_published_tokens(paper.PAGED):.0f} by the paper's numbers for vLLM in "
            f"figures 2 and 13, but {_published_tokens(paper.ORCA_ORACLE):.0f} by those for Orca "
            "(Oracle), on the same trace.",
            "At that time, vLLM ran prompts in steps of their own, each a batch of few requests. "
            f"Counted so, the average here is {measured.requests_apart:.1f}.",
        ]

    def saved(self, key: Sharing) -> list[str]:
        workload, method = key.workload, key.method
        averages = ", ".join(
            f"{100 * self._results.saved[Sharing(workload, method, width)].per_request:.1f}"
            for width in paper.WIDTHS
        )
        averaged = (
            "The paper does not say how it averages. Over requests instead of blocks, "
            f"{workload} with {method} would save {averages} percent."
        )
        if method == "beam search":
            return [*self._deviations(), averaged, *self._candidates(key)]
        first, last = min(paper.WIDTHS), max(paper.WIDTHS)
        published = paper.SAVED[workload, method][first]
        expected = published * (1 - 1 / last) / (1 - 1 / first)
        proportion = (
            "Of n samples of one length, all but one save what they share, so savings go with "
            f"1 - 1/n: the paper's {published} percent of {first} samples ({workload}) would make "
            f"{expected:.1f} of {last}."
        )
        return [*self._deviations(), averaged, proportion, self._lengths(workload)]

    def _candidates(self, key: Sharing) -> list[str]:
        widest = Sharing(key.workload, key.method, max(paper.WIDTHS))
        usual = self._results.saved[widest].of_blocks
        earlier = self._results.saved[widest._replace(repeats_after=EARLIER)].of_blocks
        return [
            "The paper decoded with OPT-13B, this draws the candidates of beams at random. Text "
            "that is driven on past its natural end repeats itself; the next token is then nearly "
            "certain, no new beam beats an old one, and beams stay apart. Here this begins after "
            f"{widest.repeats_after} tokens, as measured with another model (docs/memory.md). "
            f"After {EARLIER}, {widest.width} beams of {key.workload} save {earlier:.1%} instead "
            f"of {usual:.1%}."
        ]

    def _lengths(self, workload: str) -> str:
        if isinstance(self._results.sources[workload], RecordedLengths):
            return f"The lengths of {workload} are those of the trace that was given."
        return (
            "Of the datasets' lengths only the means are published; how they spread, and how the "
            "prompt and the output of a request go together, is assumed."
        )

    def _deviations(self) -> list[str]:
        """What the configuration does differently from the paper's vLLM, if anything."""
        settings = self._settings
        found = [
            f"{name} is {ours} ({published} in the paper)"
            for name, ours, published in (
                ("the policy", settings.policy.name, paper.POLICY),
                ("block_size", settings.block_size, paper.BLOCK_SIZE),
                ("max_num_seqs", settings.max_num_seqs, paper.MAX_NUM_SEQS),
            )
            if ours != published
        ]
        return [f"In the configuration, {' and '.join(found)}."] if found else []


def _published_tokens(system: str) -> float:
    """Tokens that a batched ShareGPT request holds by figures 2 and 13 of the paper."""
    share = paper.MEMORY[system]["token_states"] / 100
    return share * KV_SLOTS / paper.BATCHED[paper.SHAREGPT][system]
