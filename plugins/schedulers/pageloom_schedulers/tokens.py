"""Who gets the tokens of a step."""

from __future__ import annotations

from enum import StrEnum

from pageloom.contract import PlanView, Refusal, RequestView, SchedulerView


class PrefillShare(StrEnum):
    fixed = "fixed"
    adaptive = "adaptive"


class TokenBudget:
    """Keeps a token for each branch that decodes, and gives prefills what is left, or a share.

    A decode waits for the whole step that it is part of, prefills included. ``adaptive`` bounds
    what all decodes wait together: of ``max_num_batched_tokens``, prefills take at most the part
    ``1 - d / max_num_seqs``, where d branches decode, but never less than an eighth of it is
    theirs. With ``fixed`` it is all that decodes leave.

    A prompt that must be computed whole (``enable_chunked_prefill`` off) may exceed the share if it
    is the first of its step.
    """

    def __init__(self, view: SchedulerView, plan: PlanView, share: PrefillShare) -> None:
        self.refusal: Refusal | None = None  # why the last `run` granted nothing
        self._plan = plan
        self._decodes = {r: r.num_branches for r in view.running if not r.is_prefill}
        self._reserved = sum(self._decodes.values())  # for decodes that have not run yet
        self._prefill = budget = plan.tokens_left
        self._untouched = True  # whether no prefill ran yet
        if share is PrefillShare.adaptive:
            seats = plan.seats_left + sum(r.num_branches for r in view.running)
            self._prefill = max(budget - budget * self._reserved // seats, -(-budget // 8))

    def run(self, request: RequestView, spare_blocks: int = 0) -> int:
        """`PlanView.run` with as many tokens as the request may have; 0 if it is refused."""
        if (tokens := self._decodes.get(request)) is not None:
            granted = self._plan.run(request)
            self.refusal = self._plan.refusal
            if granted:
                self._reserved -= tokens
            return granted
        left = self._plan.tokens_left - self._reserved
        granted = self._run_prefill(request, min(left, self._prefill), spare_blocks)
        if not granted and self.refusal == "tokens" and self._untouched and left > self._prefill:
            granted = self._run_prefill(request, left, spare_blocks)
        if granted:
            self._untouched = False
            self._prefill -= granted
        return granted

    def release(self, request: RequestView) -> None:
        """A running request was preempted: no tokens are kept for it any more."""
        self._reserved -= self._decodes.pop(request, 0)

    def _run_prefill(self, request: RequestView, tokens: int, spare_blocks: int) -> int:
        if tokens < 1:
            self.refusal = "tokens"
            return 0
        granted = self._plan.run(request, tokens, spare_blocks)
        self.refusal = self._plan.refusal
        return granted
