"""``tokenizer.json`` of a model's tokenizer, as far as the model can say its tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import copy
from typing import Any


def tokenizer_json(tokenizer: Any, vocab_size: int) -> str | None:
    """``tokenizer.json`` of a ``PreTrainedTokenizerFast``; None for None.

    Some tokenizers have more tokens than the model has, such as one for padding that was added
    later. Those from ``vocab_size`` on can never be drawn, and are left out.
    """
    if tokenizer is None:
        return None
    plain = copy(tokenizer.backend_tokenizer)
    plain.no_padding()
    plain.no_truncation()
    spec = str(plain.to_str())
    largest = max(plain.get_vocab(with_added_tokens=True).values(), default=-1)
    return spec if largest < vocab_size else _cut(spec, vocab_size)


def _cut(spec: str, vocab_size: int) -> str:
    found = json.loads(spec)
    found["added_tokens"] = [t for t in found["added_tokens"] if t["id"] < vocab_size]
    model = found["model"]
    if isinstance(model["vocab"], list):  # a token's id is its place
        model["vocab"] = model["vocab"][:vocab_size]
    else:
        model["vocab"] = {t: n for t, n in model["vocab"].items() if n < vocab_size}
    if "merges" in model:
        prefix = model.get("continuing_subword_prefix") or ""
        model["merges"] = [m for m in model["merges"] if _is_whole(m, prefix, model["vocab"])]
    return json.dumps(found)


def _is_whole(merge: str | list[str], prefix: str, vocab: Mapping[str, int]) -> bool:
    """Whether both parts and what becomes of them are there."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left in vocab and right in vocab and left + right.removeprefix(prefix) in vocab
