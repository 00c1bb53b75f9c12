"""Whether a request can ever run, and how long its output may become."""

from __future__ import annotations

from pageloom.memory import blocks_for_branches, tokens_for_branches
from pageloom.scheduling.errors import RequestTooLargeError
from pageloom.scheduling.plan import Limits
from pageloom.scheduling.request import Request


def check_size(request: Request, limits: Limits, num_blocks: int) -> None:
    """Raise `RequestTooLargeError` unless the request can run to its ``max_tokens``, or to one
    token without any, in a pool of ``num_blocks``; `ValueError` if its prompt is empty."""
    prompt = len(request.prompt_token_ids)
    name = f"request {request.request_id}"
    if not prompt:
        raise ValueError(f"{name} has an empty prompt; give at least one token")
    if prompt >= limits.max_model_len:
        raise RequestTooLargeError(
            f"{name} has a prompt of {prompt} tokens, but max_model_len is "
            f"{limits.max_model_len} and must leave room for one output token"
        )
    branches, size = request.seats, limits.block_size
    for key, most in (
        ("max_num_seqs", limits.max_num_seqs),
        ("max_num_batched_tokens", limits.max_num_batched_tokens),
    ):
        if branches > most:
            raise RequestTooLargeError(
                f"{name} has {branches} branches, which run in one step, but {key} is {most}; "
                f"lower n or beam_width, or raise {key}",
                "n",
            )
    output = min(request.params.max_tokens or 1, limits.max_model_len - prompt)
    computed = prompt + output - 1  # the last token is returned and never computed
    needed = blocks_for_branches(branches, prompt, computed, size)
    if needed > num_blocks:
        several = f", {branches} branches" if branches > 1 else ""
        raise RequestTooLargeError(
            f"{name} may need {needed} KV blocks ({prompt} prompt + {output} output tokens"
            f"{several}, {size} per block), but the pool has {num_blocks}; shorten it, or raise "
            f"kv_cache.memory (or kv_cache.num_blocks)"
        )
    if not limits.enable_chunked_prefill and computed > limits.max_num_batched_tokens:
        raise RequestTooLargeError(
            f"{name} may have to compute {computed} tokens in one step, but "
            f"max_num_batched_tokens is {limits.max_num_batched_tokens} and "
            f"enable_chunked_prefill is off; shorten it, or change one of the two"
        )


def room_for_output(request: Request, limits: Limits, num_blocks: int) -> int:
    """Most output tokens: what it asks for, or else all that there is room for."""
    prompt = len(request.prompt_token_ids)
    room = limits.max_model_len - prompt
    if request.params.max_tokens is not None:
        return min(request.params.max_tokens, room)
    most = tokens_for_branches(request.seats, prompt, num_blocks, limits.block_size)
    if not limits.enable_chunked_prefill:
        most = min(most, limits.max_num_batched_tokens)
    return min(room, most + 1 - prompt)
