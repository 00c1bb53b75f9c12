"""From what a client sends to token ids that are safe to queue."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

# What `apply_chat_template` itself goes by, such as which template to use.
NOT_VARIABLES = frozenset(
    ["messages", *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters]
)

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


class PromptEncoder:
    """Checks and tokenizes. May be used by several threads at the same time.

    Every `ValueError` says what is wrong with the prompt. What is surely too long is refused
    before it is tokenized, since that takes seconds for megabytes of text.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, max_model_len: int
    ) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._max_chars = 0
        if tokenizer is not None:
            # A token stands for no more text than its own spelling in the vocabulary.
            self._max_chars = max_model_len * max(map(len, tokenizer.get_vocab()))

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a text, with the special tokens that the tokenizer adds to one; token ids
        are checked and returned as a list."""
        if isinstance(prompt, str):
            return self._tokenize(prompt, add_special_tokens=True)
        return self._checked(prompt)

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of a text and nothing else."""
        return self._tokenize(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        if self.tokenizer is None:
            raise ValueError("this model has no tokenizer, and so no text")
        return str(self.tokenizer.decode(list(token_ids)))

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[int]:
        """Token ids of a conversation by the model's chat template, up to where it answers.

        Without ``add_generation_prompt`` they end behind the last message, and with
        ``continue_final_message`` within it. The template tells the model of ``tools``, each
        of which is described as in OpenAI's API. ``variables`` are further ones of the template,
        none of `NOT_VARIABLES`.
        """
        if self.tokenizer is None or not self.tokenizer.chat_template:
            raise ValueError("this model has no chat template; use a plain prompt")
        if not NOT_VARIABLES.isdisjoint(variables):
            raise ValueError(f"{', '.join(variables)}: not all are variables of a chat template")
        try:
            text = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **variables,
            )
        except Exception as error:  # a template is a program, and raises whatever Python does
            raise ValueError(f"the chat template refuses the messages: {error}") from error
        return self._tokenize(str(text), add_special_tokens=False)

    def _tokenize(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if self.tokenizer is None:
            raise ValueError("this model has no tokenizer; give the prompt as token ids")
        if len(text) > self._max_chars:
            raise ValueError(
                f"the prompt has {len(text):,} characters, more than {self._max_model_len} tokens "
                f"(max_model_len) can stand for"
            )
        try:
            token_ids = list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens))
        except TypeError as error:  # what tokenizers raises for lone surrogates
            raise ValueError(f"the prompt is not valid Unicode text: {error}") from error
        if (largest := max(token_ids, default=0)) >= self.vocab_size:
            token = self.tokenizer.convert_ids_to_tokens(largest)
            raise ValueError(
                f"the prompt has the token {token!r}, which the tokenizer knows as {largest}, but "
                f"the model has {self.vocab_size} tokens only"
            )
        return token_ids

    def _checked(self, prompt: Sequence[int]) -> list[int]:
        if isinstance(prompt, (bytes, bytearray, Mapping)):
            raise ValueError(f"a prompt is text or token ids, not {type(prompt).__name__}")
        try:
            token_ids = [_integer(token_id) for token_id in prompt]
        except TypeError as error:
            raise ValueError(f"a prompt is text or a list of token ids: {error}") from error
        for token_id in token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise ValueError(
                    f"prompt token id {token_id} is not in the vocabulary of {self.vocab_size} "
                    "tokens"
                )
        return token_ids


def _integer(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError(f"{value} is not a token id")
    return operator.index(value)


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A text or a sequence of token ids is one prompt; a sequence of either is many."""
    if isinstance(prompts, str) or (len(prompts) and _is_integer(prompts[0])):
        return [cast("Prompt", prompts)]
    return list(cast("Sequence[Prompt]", prompts))


def _is_integer(value: Any) -> bool:
    try:
        operator.index(value)
    except TypeError:
        return False
    return True
