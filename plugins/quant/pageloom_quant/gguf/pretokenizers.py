"""How byte-level BPE vocabularies cut text before merging, by ``tokenizer.ggml.pre``.

The names are llama.cpp's (``src/llama-vocab.cpp``); the patterns are those of the tokenizers that
the models were trained with. The wrong pattern gives valid tokens that the model never saw, so a
name that is not listed is refused rather than guessed.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + TAIL
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*%s"
    r"|%s| ?[^\s\p{L}\p{N}]+[\r\n/]*"
) + TAIL
TEKKEN = CASED % ("", "", r"\p{N}")
GPT4O = CASED % (f"{CONTRACTIONS}?", f"{CONTRACTIONS}?", r"\p{N}{1,3}")


@dataclass(frozen=True)
class PreTokenizer:
    """One way to cut text into the pieces that are merged on their own."""

    pattern: str | None = None  # None is GPT-2's
    single_digits: bool = False
    whole_words: bool = False  # a piece that is a token is not merged
    composed: bool = False  # Unicode NFC first
    adds_bos: bool = False  # where the file does not say

    def build(self, add_prefix_space: bool) -> pre_tokenizers.PreTokenizer:
        """Cut, then spell bytes as the characters that the vocabulary is written in."""
        steps: list[pre_tokenizers.PreTokenizer] = []
        if self.single_digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        if self.pattern is not None:
            steps.append(pre_tokenizers.Split(Regex(self.pattern), behavior="isolated"))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space, use_regex=self.pattern is None))
        return pre_tokenizers.Sequence(steps)

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.composed else None


_GPT2 = PreTokenizer()
_DIGITS = PreTokenizer(single_digits=True)
_LLAMA3 = PreTokenizer(LLAMA3, whole_words=True, adds_bos=True)
_CL100K = PreTokenizer(LLAMA3)
_QWEN2 = PreTokenizer(QWEN2, composed=True)

PRE_TOKENIZERS = {
    "gpt-2": _GPT2,
    "olmo": _GPT2,
    "phi-2": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "dbrx": _CL100K,
    "smaug-bpe": _CL100K,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": PreTokenizer(TEKKEN, whole_words=True, adds_bos=True),
    "gpt-4o": PreTokenizer(GPT4O),
}
