"""Text that grows with token ids."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what decoders write for bytes that are not UTF-8
MAX_CONTEXT_TOKENS = 24
# With each token a stream decodes all that it holds again, and it holds everything as long as
# the text ends in REPLACEMENT, so a long run of stray bytes would cost the square of its length.
MAX_HELD_TOKENS = 16
MAX_CHAR_TOKENS = 4  # a character has at most 4 bytes of UTF-8, each a token at worst


class TextStream:
    """Decodes one sequence incrementally, in whole characters.

    The pieces, joined, are what decoding all tokens behind the prompt gives. One exception: a
    decoder with byte fallback replaces all of a run of byte tokens if any part of it is not
    UTF-8, even characters that were complete and are sent. Here those stay, and what follows in
    the run is decoded by itself.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool
    ) -> None:
        """The last tokens of the prompt decide whether the first of the output keeps its space."""
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._context: list[int] = []  # what the stream has given the text of, as far as needed
        self._held: list[int] = []  # what it has not
        self._restart(self._usable_context(prompt_token_ids))

    def append(self, token_id: int) -> str:
        """Take the next token; return the text that no later token can change, maybe none."""
        self._held.append(token_id)
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except Exception as error:  # the library has no type for it
            if "Invalid prefix" not in str(error):
                raise
            # Text that was given has changed: the run of byte tokens that the class describes.
            text = self._decode(self._held)
            self._restart(self._usable_context(self._held))
            return text
        if text is None:
            return self._settle() if len(self._held) >= MAX_HELD_TOKENS else ""
        self._context, self._held = self._held, []
        return text

    def finish(self) -> str:
        """The rest of the text: a character that was not completed becomes replacements."""
        text = self._tail(self._held)
        self._restart([])
        return text

    def _settle(self) -> str:
        """Give up most of what is held; it has grown past what any one character can explain."""
        if not self._tail(self._held):  # nothing but skipped special tokens or unknown ids
            self._restart(self._context)
            return ""
        for keep in range(MAX_CHAR_TOKENS - 1, 2 * MAX_CHAR_TOKENS):
            old, new = self._held[:-keep], self._held[-keep:]
            # Where the parts decode to the whole there is no character to be cut apart.
            if self._tail(old) + self._decode(new) == self._tail(self._held):
                text = self._tail(old)
                self._restart([])
                return text + "".join(self.append(token_id) for token_id in new)
        return ""

    def _restart(self, context: list[int]) -> None:
        self._context, self._held = context, []
        self._stream = DecodeStream(ids=context, skip_special_tokens=self._skip_special_tokens)

    def _usable_context(self, token_ids: Sequence[int]) -> list[int]:
        """The fewest last tokens that decode to text and whole characters, or none.

        A stream that starts behind anything else returns the text of its context, too.
        """
        for count in range(1, min(len(token_ids), MAX_CONTEXT_TOKENS) + 1):
            context = list(token_ids[-count:])
            text = self._decode(context)
            if text and REPLACEMENT not in text:
                return context
        return []

    def _tail(self, token_ids: list[int]) -> str:
        """What ``token_ids`` add to the text behind the context."""
        before, whole = self._decode(self._context), self._decode(self._context + token_ids)
        return whole[len(before) :] if whole.startswith(before) else self._decode(token_ids)

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
        return text
