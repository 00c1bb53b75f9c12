"""What a `transformers` model says of a prompt, and how far an engine's output is from it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from pageloom import SamplingParams
from pageloom.engine.outputs import RequestOutput
from pageloom.scheduling.logprobs import TokenLogprobs
from pageloom.scheduling.params import MAX_LOGPROBS


def greedy_params(max_tokens: int) -> SamplingParams:
    """Greedy decoding, with as many log-probabilities at every position as can be had."""
    return SamplingParams(
        temperature=0, max_tokens=max_tokens, logprobs=MAX_LOGPROBS, prompt_logprobs=MAX_LOGPROBS
    )


def scored_tokens(output: RequestOutput) -> tuple[list[int], list[TokenLogprobs]]:
    """All token ids of prompt and output, and the log-probabilities of each but the first."""
    (completion,) = output.outputs
    assert output.prompt_logprobs is not None
    assert completion.logprobs is not None
    token_ids = [*output.prompt_token_ids, *completion.token_ids]
    first, *entries = [*output.prompt_logprobs, *completion.logprobs]
    assert first is None
    assert [entry.token_id for entry in entries] == token_ids[1:]
    return token_ids, entries


class Reference:
    """A model of `transformers`, run one sequence at a time by its own forward."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model.eval()
        self._known: dict[tuple[int, ...], torch.Tensor] = {}

    @torch.inference_mode()
    def logprobs(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Float32 ``[len(token_ids), vocab_size]``: one forward over the whole sequence."""
        key = tuple(token_ids)
        if key not in self._known:
            logits = self.model(torch.tensor([key]), use_cache=False).logits[0]
            self._known[key] = logits.float().log_softmax(-1)
        return self._known[key]

    def scores(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Float32 ``[len(token_ids) - 1]``: the log-probability of each token but the first."""
        following = torch.tensor(token_ids[1:])[:, None]
        return self.logprobs(token_ids)[:-1].gather(1, following)[:, 0]

    def greedy(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """The new tokens of `generate`, up to and with an end-of-sequence token."""
        ids = torch.tensor([prompt])
        output = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens
        )
        return output[0, len(prompt) :].tolist()

    def margin(self, prompt: Sequence[int], tokens: Sequence[int]) -> float:
        """By how much the likeliest token led at the closest of the positions that gave ``tokens``.

        Greedy outputs can only be compared where no rounding decides between two tokens.
        """
        scores = self.logprobs([*prompt, *tokens])[len(prompt) - 1 : -1]
        best = scores.topk(2).values
        return float((best[:, 0] - best[:, 1]).min())

    def errors(self, output: RequestOutput) -> torch.Tensor:
        """Float32 ``[T - 1]``: per position of prompt and output, the largest difference between
        the engine's log-probabilities and those of the model for the same sequence.

        Compared are the token that follows, each of the likeliest by its id, and the likeliest in
        order, so that neither a wrong id nor a token left out goes unseen.
        """
        token_ids, entries = scored_tokens(output)
        expected = self.logprobs(token_ids)[:-1]
        chosen = torch.tensor([entry.logprob for entry in entries])
        top = torch.tensor([[logprob for _, logprob in entry.top] for entry in entries])
        top_ids = torch.tensor([[token_id for token_id, _ in entry.top] for entry in entries])
        assert top.shape == (len(entries), MAX_LOGPROBS)
        differences = [
            (chosen - self.scores(token_ids))[:, None],
            top - expected.gather(1, top_ids),
            top - expected.topk(MAX_LOGPROBS).values,
        ]
        return torch.cat(differences, 1).abs().amax(1)
