"""Log-probabilities in the shapes of the two completion endpoints."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from transformers import PreTrainedTokenizerBase

from pageloom.engine.text_stream import REPLACEMENT, TextStream
from pageloom.scheduling.logprobs import TokenLogprobs

LEAST = -9999.0  # instead of minus infinity, for which JSON has no number
BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")  # of vocabularies with byte fallback
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # what SentencePiece spells a space with


class TokenTexts:
    """What single tokens look like, and the bytes that they stand for."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.tokenizer = tokenizer
        self._known: dict[int, tuple[str, bytes | None]] = {}

    def text(self, token_id: int) -> str:
        """The token's text. Parts of characters read ``\\xf0\\x9f``, and so they stay distinct."""
        return self._of(token_id)[0]

    def legacy_text(self, token_id: int) -> str:
        """The same for ``/v1/completions``, where OpenAI marks parts: ``bytes:\\xf0\\x9f``."""
        text, raw = self._of(token_id)
        return f"bytes:{text}" if raw is not None and not _is_text(raw) else text

    def bytes_of(self, token_id: int) -> list[int] | None:
        """None if there is no tokenizer, and so no text."""
        raw = self._of(token_id)[1]
        return None if raw is None else list(raw)

    def _of(self, token_id: int) -> tuple[str, bytes | None]:
        if token_id not in self._known:
            self._known[token_id] = self._look_up(token_id)
        return self._known[token_id]

    def _look_up(self, token_id: int) -> tuple[str, bytes | None]:
        if self.tokenizer is None:
            return f"token_id:{token_id}", None
        text, spelling = str(self.tokenizer.decode([token_id])), self._spelling(token_id)
        if REPLACEMENT in text:
            raw = _spelled_bytes(spelling)
            if raw is not None:
                return raw.decode() if _is_text(raw) else _escaped(raw), raw
        if spelling.startswith(SPACE):  # which is dropped at the beginning of a text
            text = spelling.replace(SPACE, " ")
        return text, text.encode("utf-8", "replace")

    def _spelling(self, token_id: int) -> str:
        """In the vocabulary; empty for tokens that were added to it, which are spelled plainly."""
        assert self.tokenizer is not None
        if token_id in self.tokenizer.added_tokens_decoder:
            return ""
        return str(self.tokenizer.convert_ids_to_tokens(token_id) or "")


@dataclass
class EchoedPrompt:
    """A prompt as ``echo`` returns it."""

    text: str
    token_ids: list[int]
    offsets: list[int]  # of each token in the text, in characters

    @classmethod
    def of_text(
        cls, tokenizer: PreTrainedTokenizerBase, text: str, token_ids: list[int]
    ) -> EchoedPrompt:
        """``token_ids`` are the text's, with special tokens around them or without."""
        for special in (True, False):
            encoded = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
            if encoded["input_ids"] == token_ids:
                break
        starts = (start for start, _ in encoded["offset_mapping"])
        # A token that was put around the text says (0, 0), behind the text as well as before it.
        return cls(text, token_ids, list(accumulate(starts, max)))

    @classmethod
    def of_tokens(
        cls, tokenizer: PreTrainedTokenizerBase | None, token_ids: list[int]
    ) -> EchoedPrompt:
        """The text is what the tokens decode to, special ones included; empty without tokenizer."""
        if tokenizer is None:
            return cls("", token_ids, [0] * len(token_ids))
        stream, text, offsets = TextStream(tokenizer.backend_tokenizer, [], False), "", []
        for token_id in token_ids:
            offsets.append(len(text))
            text += stream.append(token_id)
        return cls(text + stream.finish(), token_ids, offsets)


class CompletionLogprobs:
    """The parallel lists of ``/v1/completions`` for one choice, as it grows.

    ``text_offset`` is where in the choice's text a token begins, in characters. Tokens that are
    text only together begin where that does.
    """

    def __init__(self, texts: TokenTexts, prompt: Sequence[int], skip_special_tokens: bool) -> None:
        self._texts = texts
        self._stream = None
        if texts.tokenizer is not None:
            backend = texts.tokenizer.backend_tokenizer
            self._stream = TextStream(backend, prompt, skip_special_tokens)
        self._offset = 0  # of the next output token
        self._lists = _no_entries()

    def add_prompt(self, prompt: EchoedPrompt, scored: Iterable[TokenLogprobs | None]) -> None:
        """Entries of the prompt that the choice's text begins with. None in ``scored`` is its
        first token, which nothing precedes."""
        for token, score, offset in zip(prompt.token_ids, scored, prompt.offsets, strict=True):
            self._append(token, score, offset)
        self._offset = len(prompt.text)

    def add(self, token_ids: Sequence[int], scored: Iterable[TokenLogprobs]) -> None:
        """Entries of the next output tokens."""
        for token, score in zip(token_ids, scored, strict=True):
            self._append(token, score, self._offset)
            if self._stream is not None:
                self._offset += len(self._stream.append(token))

    def take(self) -> dict[str, list[Any]] | None:
        """What was added since the last call, if anything was."""
        taken, self._lists = self._lists, _no_entries()
        return taken if taken["tokens"] else None

    def _append(self, token: int, score: TokenLogprobs | None, offset: int) -> None:
        for name, value in (
            ("text_offset", offset),
            ("tokens", self._texts.legacy_text(token)),
            ("token_logprobs", None if score is None else finite(score.logprob)),
            ("top_logprobs", None if score is None else self._top(score)),
        ):
            self._lists[name].append(value)

    def _top(self, score: TokenLogprobs) -> dict[str, float]:
        """The likeliest tokens, and the token itself, which may not be among them. Of two that
        look alike the likelier stays."""
        top: dict[str, float] = {}
        for token, value in (*score.top, (score.token_id, score.logprob)):
            top.setdefault(self._texts.legacy_text(token), finite(value))
        return top


def chat_logprobs(texts: TokenTexts, scored: Iterable[TokenLogprobs]) -> dict[str, Any]:
    """``{"content": [...]}``, an entry for each token."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": texts.text(token),
            "logprob": finite(logprob),
            "bytes": texts.bytes_of(token),
        }

    return {
        "content": [
            {
                **entry(score.token_id, score.logprob),
                "top_logprobs": [entry(*each) for each in score.top],
            }
            for score in scored
        ],
        "refusal": None,
    }


def finite(logprob: float) -> float:
    return max(logprob, LEAST)


def _no_entries() -> dict[str, list[Any]]:
    return {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}


def _spelled_bytes(spelling: str) -> bytes | None:
    """The bytes of a token that is spelled by them, one by one; None for one that is not."""
    if found := BYTE_TOKEN.fullmatch(spelling):
        return bytes.fromhex(found[1])
    if spelling and all(letter in BYTES for letter in spelling):
        return bytes(BYTES[letter] for letter in spelling)
    return None


def _is_text(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def _escaped(raw: bytes) -> str:
    return repr(raw)[2:-1]  # what is printable stays, as with OpenAI


def _byte_letters() -> dict[str, int]:
    """What GPT-2's byte-level vocabularies spell each byte with (Radford et al. 2019): printable
    characters of Latin-1 by themselves, the other bytes by characters from 256 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + place): byte for place, byte in enumerate(others)
    }


BYTES = _byte_letters()
