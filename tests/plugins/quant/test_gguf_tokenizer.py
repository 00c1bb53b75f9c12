"""Tokenizers rebuilt from GGUF metadata encode as the models were trained.

The expectations are computed here, from the raw tables of the file, by the plainest possible
implementations of the two algorithms.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
import regex
from gguf_writing import add_key
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from pageloom_quant.gguf import GGUFLoader
from pageloom_quant.gguf.pretokenizers import PRE_TOKENIZERS, QWEN2

BYTES = bytes_to_unicode()
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
TEXTS = [
    "Hello, world!",
    "In 2024 there were 1234567 of them, or 3.14159%",
    "def f(x):\n    return x  **  2\n\n\n# done\t\t",
    "I'll don't WE'RE they've",
    "caf\u00e9 cafe\u0301 \u4f60\u597d\uff0c\u4e16\u754c",
    "\u0417\u0434\u0440\u0430\u0432\u0441\u0442\u0432\u0443\u0439 \u0645\u0631\u062d\u0628\u0627",
    "\U0001f600\U0001f469\u200d\U0001f469\u200d\U0001f467 \u00bd \u0665\u0666 \u2167",
    "   leading and trailing   ",
    "\r\n\r\n \u00a0\u3000x",
    "{{'a': [1,2,3]}}<>|~`@#$%^&*()",
    "",
    " ",
    "\x00\x01\ufffd",
]


def write_tokenizer(path: Path, architecture: str = "llama", **keys: Any) -> GGUFLoader:
    """A file with no tensors. ``keys`` are those of ``tokenizer.ggml``."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        add_key(writer, f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return GGUFLoader(GGUFLoader.Config(), str(path))


def tokenizer_of(loader: GGUFLoader) -> PreTrainedTokenizerBase:
    tokenizer = loader.tokenizer()
    assert tokenizer is not None
    return tokenizer


def merge(symbols: list[str], rank: dict[tuple[str, str], float]) -> list[str]:
    """Merge the adjacent pair of the lowest rank, leftmost first, until none is left."""
    while True:
        pairs = [(rank[p], i) for i, p in enumerate(pairwise(symbols)) if p in rank]
        if not pairs:
            return symbols
        _, i = min(pairs)
        symbols = [*symbols[:i], symbols[i] + symbols[i + 1], *symbols[i + 2 :]]


class ByteLevelOracle:
    """SmolLM's tokenizer: digits on their own, then GPT-2's pattern, then byte-level BPE.

    Its vocabulary lacks some control characters, and drops them.
    """

    def __init__(self, tokens: Sequence[str], merges: Iterable[str]) -> None:
        self.ids = {token: i for i, token in enumerate(tokens)}
        self.rank = {tuple(pair.split(" ")): i for i, pair in enumerate(merges)}

    def encode(self, text: str) -> list[int]:
        stretches = [part for part in regex.split(r"(\p{N})", text) if part]
        words = [word for part in stretches for word in regex.findall(GPT2_PATTERN, part)]
        spelled = [[BYTES[b] for b in word.encode() if BYTES[b] in self.ids] for word in words]
        return [self.ids[symbol] for word in spelled for symbol in merge(word, self.rank)]

    def covers(self, text: str) -> bool:
        return all(BYTES[byte] in self.ids for byte in text.encode())


@pytest.fixture(scope="module")
def smollm(demo_path: Path) -> PreTrainedTokenizerBase:
    return tokenizer_of(GGUFLoader(GGUFLoader.Config(), str(demo_path)))


@pytest.fixture(scope="module")
def oracle(demo_reference: gguf.GGUFReader) -> ByteLevelOracle:
    fields = demo_reference.fields
    return ByteLevelOracle(
        fields["tokenizer.ggml.tokens"].contents(), fields["tokenizer.ggml.merges"].contents()
    )


@pytest.mark.parametrize("text", TEXTS)
def test_smollm_encodes_as_plain_bpe_does(
    smollm: PreTrainedTokenizerBase, oracle: ByteLevelOracle, text: str
) -> None:
    assert smollm.encode(text) == oracle.encode(text)


@settings(deadline=None, max_examples=200)
@given(st.text(max_size=60) | st.text("aA1 .\n\t'sl\u00e9\u0661", max_size=60))
def test_smollm_agrees_on_any_text_and_decodes_it_back(
    smollm: PreTrainedTokenizerBase, oracle: ByteLevelOracle, text: str
) -> None:
    ids = smollm.encode(text)
    assert ids == oracle.encode(text)
    if oracle.covers(text):
        assert smollm.decode(ids) == text


def test_special_tokens_are_one_id_each_and_may_be_skipped(
    smollm: PreTrainedTokenizerBase, demo_reference: gguf.GGUFReader
) -> None:
    tokens = demo_reference.fields["tokenizer.ggml.tokens"].contents(slice(17))
    assert tokens[0] == "<|endoftext|>"
    assert tokens[16] == "<empty_output>"
    for index, token in enumerate(tokens):
        ids = smollm.encode(f"a{token}b")
        assert ids == [*smollm.encode("a"), index, *smollm.encode("b")]
        assert smollm.decode(ids) == f"a{token}b"
        assert smollm.decode(ids, skip_special_tokens=True) == "ab"
    assert set(smollm.all_special_ids) == set(range(17))


def test_smollm_knows_its_named_tokens(smollm: PreTrainedTokenizerBase) -> None:
    assert (smollm.bos_token, smollm.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert (smollm.unk_token, smollm.pad_token) == ("<|endoftext|>", "<|im_end|>")
    assert len(smollm) == smollm.vocab_size == 49152


def test_smollm_renders_its_chat_template(smollm: PreTrainedTokenizerBase) -> None:
    prompt = smollm.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = smollm.encode(prompt, add_special_tokens=False)
    assert [i for i in ids if i < 17] == [1, 2, 1, 2, 1]


SAMPLE = "I'LL pay 12345 \u20ac\n\n  HelloWorld's"
SPLITS = {
    "gpt-2": "I|'|LL| pay| 12345| \u20ac|\n\n | HelloWorld|'s",
    "smollm": "I|'|LL| pay| |1|2|3|4|5| \u20ac|\n\n | HelloWorld|'s",
    "llama-bpe": "I|'LL| pay| |123|45| \u20ac\n\n| | HelloWorld|'s",
    "qwen2": "I|'LL| pay| |1|2|3|4|5| \u20ac\n\n| | HelloWorld|'s",
    "tekken": "I|'LL| pay| |1|2|3|4|5| \u20ac\n\n| | Hello|World|'s",
    "gpt-4o": "I'LL| pay| |123|45| \u20ac\n\n| | Hello|World's",
}


@pytest.mark.parametrize("name", SPLITS)
def test_each_vocabulary_cuts_text_its_own_way(name: str) -> None:
    pieces = PRE_TOKENIZERS[name].build(add_prefix_space=False).pre_tokenize_str(SAMPLE)
    assert "|".join(SAMPLE[start:end] for _, (start, end) in pieces) == SPLITS[name]


def test_the_qwen2_pattern_is_the_one_of_transformers() -> None:
    assert QWEN2 == PRETOKENIZE_REGEX


def byte_level_keys(**keys: Any) -> dict[str, Any]:
    alphabet = [BYTES[byte] for byte in range(256)]
    tokens = [*alphabet, "ab", "abc", "<s>", "</s>", "<tool>"]
    return {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [1] * 258 + [3, 3, 4],
        "merges": ["a b"],
        "bos_token_id": 258,
        "eos_token_id": 259,
        **keys,
    }


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, ["ab", "c"]),
        ({"pre": "llama-bpe"}, ["<s>", "abc"]),  # whole words, and a bos by default
        ({"pre": "llama-bpe", "add_bos_token": False}, ["abc"]),
        ({"add_bos_token": True, "add_eos_token": True}, ["<s>", "ab", "c", "</s>"]),
        ({"add_space_prefix": True}, ["\u0120", "ab", "c"]),
    ],
)
def test_flags_of_the_file_are_followed(
    tmp_path: Path, keys: dict[str, Any], expected: list[str]
) -> None:
    tokenizer = tokenizer_of(write_tokenizer(tmp_path / "t.gguf", **byte_level_keys(**keys)))
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("abc")) == expected


def test_user_defined_tokens_stay_whole_and_are_not_skipped(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(write_tokenizer(tmp_path / "t.gguf", **byte_level_keys()))
    ids = tokenizer.encode("<s>a<tool>b")
    assert ids[-2] == 260
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<tool>b"


def test_the_option_replaces_what_the_file_says(tmp_path: Path) -> None:
    path = tmp_path / "t.gguf"
    write_tokenizer(path, **byte_level_keys(pre="from-the-future"))
    loader = GGUFLoader(GGUFLoader.Config(pre_tokenizer="llama-bpe"), str(path))
    assert tokenizer_of(loader).encode("abc", add_special_tokens=False) == [257]


def test_the_option_is_refused_where_it_means_nothing(tmp_path: Path) -> None:
    path = tmp_path / "t.gguf"
    write_tokenizer(path, **spm_keys())
    loader = GGUFLoader(GGUFLoader.Config(pre_tokenizer="llama-bpe"), str(path))
    with pytest.raises(ValueError, match="for which pre_tokenizer means nothing"):
        loader.tokenizer()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"pre": "from-the-future"}, "cut by 'from-the-future', which is unknown"),
        ({"pre": "default"}, "set the loader option pre_tokenizer"),
        ({"pre": None}, "does not say how text is cut"),
        ({"model": "t5"}, "tokenizer of kind 't5'; gpt2 and llama can be loaded"),
        ({"merges": None}, "no metadata key 'tokenizer.ggml.merges'"),
        ({"merges": ["a zz"]}, "tokenizer.ggml.merges that do not fit"),
        ({"merges": ["ab"]}, "tokenizer.ggml.merges that do not fit"),
        ({"merges": [1]}, "a list of int in metadata key 'tokenizer.ggml.merges', not of str"),
        ({"tokens": [1.5] * 261}, "a list of float in metadata key 'tokenizer.ggml.tokens'"),
        (
            {"model": "llama", "scores": ["a"] * 261},
            "a list of str in metadata key 'tokenizer.ggml.scores', not of float or int",
        ),
        ({"tokens": ["a", "a"]}, "a token twice"),
        ({"token_type": [1, 1]}, "2 tokenizer.ggml.token_type for 261 tokens"),
        ({"bos_token_id": 261}, "261 in metadata key 'tokenizer.ggml.bos_token_id'"),
        ({"bos_token_id": None, "add_bos_token": True}, "adds a bos token but has no"),
        ({"model": "llama"}, "no metadata key 'tokenizer.ggml.scores'"),
        ({"model": "llama", "scores": [0.0]}, "1 tokenizer.ggml.scores for 261 tokens"),
    ],
)
def test_tables_that_cannot_be_used_are_named(
    tmp_path: Path, keys: dict[str, Any], message: str
) -> None:
    loader = write_tokenizer(tmp_path / "t.gguf", **byte_level_keys(**keys))
    with pytest.raises(ValueError, match=r"t\.gguf ") as raised:
        loader.tokenizer()
    assert message in str(raised.value)


def test_a_file_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    assert write_tokenizer(tmp_path / "t.gguf").tokenizer() is None


# SentencePiece -----------------------------------------------------------------------------------

PIECES = ["\u2581t", "he", "in", "\u2581the", "\u2581a", "\u2581\u2581", "re", "ing", "\u2581there"]
LETTERS = ["\u2581", *"theinrgaxy\n"]
SPM_TOKENS = [
    *("<unk>", "<s>", "</s>"),
    *(f"<0x{byte:02X}>" for byte in range(256)),
    *PIECES,
    *LETTERS,
    "<turn>",
]
SPM_TYPES = [2, 3, 3, *[6] * 256, *[1] * (len(PIECES) + len(LETTERS)), 3]
SPM_SCORES = [0.0] * 259 + [-float(i) for i in range(len(PIECES) + len(LETTERS))] + [0.0]


def spm_keys(**keys: Any) -> dict[str, Any]:
    return {
        "model": "llama",
        "tokens": SPM_TOKENS,
        "token_type": SPM_TYPES,
        "scores": SPM_SCORES,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        **keys,
    }


def spm_encode(text: str) -> list[str]:
    """What SentencePiece does: merge whatever makes the best-scored piece, then spell out bytes."""
    if not text:
        return []
    pieces = {token: -SPM_SCORES[SPM_TOKENS.index(token)] for token in (*PIECES, *LETTERS)}
    rank = {
        (piece[:cut], piece[cut:]): score
        for piece, score in pieces.items()
        for cut in range(1, len(piece))
    }
    symbols = merge(list((" " + text).replace(" ", "\u2581")), rank)
    return [
        token
        for symbol in symbols
        for token in ([symbol] if symbol in pieces else [f"<0x{b:02X}>" for b in symbol.encode()])
    ]


@pytest.fixture(scope="module")
def spm(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    return tokenizer_of(write_tokenizer(tmp_path_factory.mktemp("spm") / "t.gguf", **spm_keys()))


@settings(deadline=None, max_examples=200)
@given(st.text("theinrgaxy \n", max_size=40) | st.text(max_size=20))
def test_sentencepiece_merges_by_score_and_falls_back_to_bytes(
    spm: PreTrainedTokenizerBase, text: str
) -> None:
    text = text.replace("\u2581", "")  # decodes to a space, in SentencePiece too
    ids = spm.encode(text, add_special_tokens=False)
    assert spm.convert_ids_to_tokens(ids) == spm_encode(text)
    assert spm.decode(ids) == text


def test_sentencepiece_adds_a_bos_unless_told_not_to(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(write_tokenizer(tmp_path / "a.gguf", **spm_keys()))
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("the")) == ["<s>", "\u2581the"]
    plain = tokenizer_of(write_tokenizer(tmp_path / "b.gguf", **spm_keys(add_bos_token=False)))
    assert plain.convert_ids_to_tokens(plain.encode("the")) == ["\u2581the"]


def test_sentencepiece_prefixes_every_stretch_between_special_tokens(
    spm: PreTrainedTokenizerBase,
) -> None:
    tokens = spm.convert_ids_to_tokens(spm.encode("the<turn>a", add_special_tokens=False))
    assert tokens == ["\u2581the", "<turn>", "\u2581a"]


def test_sentencepiece_without_a_space_prefix(tmp_path: Path) -> None:
    keys = spm_keys(add_space_prefix=False)
    tokenizer = tokenizer_of(write_tokenizer(tmp_path / "t.gguf", **keys))
    ids = tokenizer.encode("the the", add_special_tokens=False)
    assert tokenizer.convert_ids_to_tokens(ids) == ["t", "he", "\u2581the"]
    assert tokenizer.decode(ids) == "the the"


def test_phi3_swallows_space_after_its_control_tokens(tmp_path: Path) -> None:
    loader = write_tokenizer(tmp_path / "t.gguf", "phi3", **spm_keys())
    tokenizer = tokenizer_of(loader)
    ids = tokenizer.encode("<turn>\n the<s>\na", add_special_tokens=False)
    tokens = tokenizer.convert_ids_to_tokens(ids)
    assert tokens == ["<turn>", "\u2581the", "<s>", "\u2581", "\n", "a"]
