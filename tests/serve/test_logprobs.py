"""Tokens beside their log-probabilities: their text, their bytes, where they begin."""

from __future__ import annotations

import math
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from pageloom.scheduling.logprobs import TokenLogprobs
from pageloom.serve.logprobs import CompletionLogprobs, EchoedPrompt, TokenTexts, chat_logprobs

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def byte_level() -> PreTrainedTokenizerFast:
    """As GPT-2's, with few merges, and a special token before every text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("l", "l"), ("Ġ", "a"), ("ð", "Ł"), ("Ġ", "ðŁ"), ("Ã", "©")]
    vocab = {"<s>": 0, "</s>": 1}
    vocab |= {letter: 2 + number for number, letter in enumerate(letters)}
    vocab |= {left + right: len(vocab) + n for n, (left, right) in enumerate(merges)}
    backend = Tokenizer(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def byte_fallback() -> PreTrainedTokenizerFast:
    """As Llama 2's: spaces are spelled, and bytes stand for what the vocabulary lacks."""
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": 1 + byte for byte in range(256)}
    vocab |= {piece: 257 + number for number, piece in enumerate("▁abch")}
    vocab |= {"▁a": len(vocab)}
    backend = Tokenizer(
        models.BPE(vocab, [("▁", "a")], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


BYTE_LEVEL, BYTE_FALLBACK = byte_level(), byte_fallback()


def scores(token_ids: list[int]) -> list[TokenLogprobs]:
    return [TokenLogprobs(token, -1.0, 1, ((token, -1.0),)) for token in token_ids]


@given(TEXTS)
def test_the_bytes_of_the_tokens_are_those_of_the_text(text):
    texts = TokenTexts(BYTE_LEVEL)
    token_ids = BYTE_LEVEL.encode(text, add_special_tokens=False)
    assert b"".join(bytes(texts.bytes_of(token)) for token in token_ids) == text.encode()


@given(TEXTS)
def test_so_are_they_with_byte_fallback_behind_the_space_before_it(text):
    texts = TokenTexts(BYTE_FALLBACK)
    token_ids = BYTE_FALLBACK.encode(text)
    spelled = b"".join(bytes(texts.bytes_of(token)) for token in token_ids)
    assert spelled == (f" {text}".encode() if text else b"")


def test_a_part_of_a_character_is_shown_by_its_bytes():
    texts = TokenTexts(BYTE_LEVEL)
    token_ids = BYTE_LEVEL.encode("a\N{GRINNING FACE}é", add_special_tokens=False)
    assert [texts.text(t) for t in token_ids] == ["a", "\\xf0\\x9f", "\\x98", "\\x80", "é"]
    legacy = ["a", "bytes:\\xf0\\x9f", "bytes:\\x98", "bytes:\\x80", "é"]
    assert [texts.legacy_text(t) for t in token_ids] == legacy
    spaced = BYTE_LEVEL.encode(" \N{GRINNING FACE}", add_special_tokens=False)
    assert texts.text(spaced[0]) == " \\xf0\\x9f"


def test_a_replacement_character_that_the_text_has_is_known_by_its_bytes():
    texts = TokenTexts(BYTE_FALLBACK)
    (*_, first, second, third) = BYTE_FALLBACK.encode("\N{REPLACEMENT CHARACTER}")
    assert [texts.text(t) for t in (first, second, third)] == ["\\xef", "\\xbf", "\\xbd"]


def test_a_special_token_has_its_own_text():
    assert TokenTexts(BYTE_LEVEL).text(BYTE_LEVEL.eos_token_id) == "</s>"
    assert TokenTexts(BYTE_LEVEL).bytes_of(BYTE_LEVEL.eos_token_id) == list(b"</s>")


def test_without_a_tokenizer_a_token_is_its_id():
    texts = TokenTexts(None)
    assert (texts.text(7), texts.legacy_text(7), texts.bytes_of(7)) == (
        "token_id:7",
        "token_id:7",
        None,
    )


@given(TEXTS, TEXTS)
def test_tokens_begin_where_their_text_does(prompt, output):
    """Of a prompt that is text, of one that is tokens, and of the output behind either."""
    prompt_ids = BYTE_LEVEL.encode(prompt, add_special_tokens=False)
    output_ids = BYTE_LEVEL.encode(output, add_special_tokens=False)
    echoes = [
        EchoedPrompt.of_text(BYTE_LEVEL, prompt, prompt_ids),
        EchoedPrompt.of_tokens(BYTE_LEVEL, prompt_ids),
    ]
    for echo in echoes:
        lists = CompletionLogprobs(TokenTexts(BYTE_LEVEL), prompt_ids, True)
        lists.add_prompt(echo, scores(prompt_ids))
        lists.add(output_ids, scores(output_ids))
        taken = lists.take()
        if taken is None:
            assert not prompt + output
            continue
        assert echo.text == prompt
        assert all(a <= b for a, b in pairwise(taken["text_offset"]))
        for offset, token in zip(taken["text_offset"], taken["tokens"], strict=True):
            if not token.startswith("bytes:"):
                assert (prompt + output).startswith(token, offset)


def test_tokens_around_a_text_begin_at_its_ends():
    token_ids = BYTE_LEVEL.encode("hall a")
    assert (token_ids[0], token_ids[-1]) == (0, 1)
    echo = EchoedPrompt.of_text(BYTE_LEVEL, "hall a", token_ids)
    assert echo.offsets == [0, 0, 1, 2, 4, 4]
    assert EchoedPrompt.of_tokens(BYTE_LEVEL, token_ids).text == "<s>hall a</s>"


def test_a_special_token_that_is_not_shown_takes_no_place():
    lists = CompletionLogprobs(TokenTexts(BYTE_LEVEL), [], skip_special_tokens=True)
    token_ids = [*BYTE_LEVEL.encode("h", add_special_tokens=False), 0, 1]
    token_ids += BYTE_LEVEL.encode("i", add_special_tokens=False)
    lists.add(token_ids, scores(token_ids))
    assert lists.take()["text_offset"] == [0, 1, 1, 1]
    assert lists.take() is None


def test_the_token_itself_is_among_the_likeliest_and_json_has_numbers_for_all():
    letters = BYTE_LEVEL.encode("abc", add_special_tokens=False)
    score = TokenLogprobs(letters[2], -math.inf, 9, ((letters[0], -0.5), (letters[1], -1.5)))
    lists = CompletionLogprobs(TokenTexts(BYTE_LEVEL), [], skip_special_tokens=True)
    lists.add([letters[2]], [score])
    taken = lists.take()
    assert taken["top_logprobs"] == [{"a": -0.5, "b": -1.5, "c": -9999.0}]
    assert taken["token_logprobs"] == [-9999.0]
    (entry,) = chat_logprobs(TokenTexts(BYTE_LEVEL), [score])["content"]
    assert entry["logprob"] == -9999.0
    assert [top["token"] for top in entry["top_logprobs"]] == ["a", "b"]


def test_of_tokens_that_look_alike_the_likelier_is_shown():
    (letter,) = BYTE_LEVEL.encode("a", add_special_tokens=False)
    lists = CompletionLogprobs(TokenTexts(None), [], skip_special_tokens=True)
    lists.add([letter], [TokenLogprobs(letter, -0.25, 1, ((letter, -0.25), (letter, -3.0)))])
    assert lists.take()["top_logprobs"] == [{f"token_id:{letter}": -0.25}]
