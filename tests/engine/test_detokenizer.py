import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from pageloom.engine.detokenizer import Detokenizer
from pageloom.engine.stop_strings import StopStrings
from pageloom.scheduling.params import SamplingParams

TEXT = [
    "The quick brown fox jumps over the lazy dog, twice. Hello there, hello world!",
    "Ça coûte 5 € à Zürich — naïve façade; 猫は猫です。 emoji 😀👍🏽 and more 😀 text.",
]


def train_byte_level():
    """Like GPT-2, Llama 3, Qwen, SmolLM2: each byte of UTF-8 is a character of the vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=["<|start|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


WORDS = ["▁", "▁the", "▁a", "▁hello", "x", "ing", "o", "é", "猫"]


def build_sentencepiece():
    """Like Llama 2, Mistral, Gemma: metaspace, byte fallback, and a leading space that goes."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *bytes_, *WORDS])}
    model = models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


BYTE_LEVEL = train_byte_level()
SENTENCEPIECE = build_sentencepiece()
BOTH = pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["bytes", "pieces"])


def piece_ids(*pieces):
    """Ids of sentencepiece tokens; an integer stands for the token of that byte."""
    names = [f"<0x{piece:02X}>" if isinstance(piece, int) else piece for piece in pieces]
    ids = SENTENCEPIECE.convert_tokens_to_ids(names)
    assert SENTENCEPIECE.convert_ids_to_tokens(ids) == names
    return ids


def byte_ids(data):
    """One byte-level token for each byte, by the alphabet of GPT-2."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    names = [chr(b) if b in printable else chr(256 + others.index(b)) for b in data]
    return BYTE_LEVEL.convert_tokens_to_ids(names)


def decode(tokenizer, token_ids, skip_special_tokens=True):
    return tokenizer.decode(
        token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
    )


def stream(tokenizer, token_ids, prompt=(), **params):
    """The pieces, until a stop string or the end, and the detokenizer."""
    detokenizer = Detokenizer(tokenizer, list(prompt), SamplingParams(**params))
    pieces = []
    for token_id in token_ids:
        pieces.append(detokenizer.append(token_id))
        if detokenizer.stopped is not None:
            break
    pieces.append(detokenizer.finish())
    assert detokenizer.text == "".join(pieces)
    return pieces, detokenizer


# -- text ---------------------------------------------------------------------------------------

any_byte_level_ids = st.lists(st.integers(0, len(BYTE_LEVEL) + 2), max_size=60)


@settings(max_examples=300, deadline=None)
@given(any_byte_level_ids, st.booleans())
def test_the_pieces_of_any_byte_level_tokens_join_to_their_full_decode(token_ids, skip):
    pieces, _ = stream(BYTE_LEVEL, token_ids, skip_special_tokens=skip)
    assert "".join(pieces) == decode(BYTE_LEVEL, token_ids, skip)


@settings(max_examples=200, deadline=None)
@given(any_byte_level_ids, any_byte_level_ids)
def test_the_prompt_changes_no_byte_level_text(prompt, token_ids):
    pieces, _ = stream(BYTE_LEVEL, token_ids, prompt)
    assert "".join(pieces) == decode(BYTE_LEVEL, token_ids)


characters = st.characters(min_codepoint=0x21, exclude_categories=["Cs"]).map(
    lambda char: piece_ids(*char.encode())
)
sentencepiece_ids = st.lists(
    st.one_of(
        st.sampled_from([*WORDS, "<unk>", "<s>", "</s>"]).map(lambda word: piece_ids(word)),
        characters,
    ),
    max_size=30,
).map(lambda parts: [token_id for part in parts for token_id in part])


@settings(max_examples=300, deadline=None)
@given(sentencepiece_ids, st.booleans())
def test_the_pieces_of_sentencepiece_tokens_join_to_their_full_decode(token_ids, skip):
    pieces, _ = stream(SENTENCEPIECE, token_ids, skip_special_tokens=skip)
    assert "".join(pieces) == decode(SENTENCEPIECE, token_ids, skip)


@settings(max_examples=200, deadline=None)
@given(sentencepiece_ids, sentencepiece_ids)
def test_behind_a_prompt_the_output_continues_its_text(prompt, token_ids):
    prompt = [*prompt, *piece_ids("▁hello", "</s>")]
    pieces, _ = stream(SENTENCEPIECE, token_ids, prompt)
    assert decode(SENTENCEPIECE, prompt) + "".join(pieces) == decode(
        SENTENCEPIECE, prompt + token_ids
    )


def test_the_space_before_the_first_word_is_kept_behind_a_prompt_only():
    assert stream(SENTENCEPIECE, piece_ids("▁a"), piece_ids("<s>", "▁the"))[1].text == " a"
    assert stream(SENTENCEPIECE, piece_ids("▁a"), piece_ids("<s>"))[1].text == "a"
    assert stream(SENTENCEPIECE, piece_ids("▁a"))[1].text == "a"


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_are_text_only_if_asked_for(skip):
    ids = BYTE_LEVEL.convert_tokens_to_ids(["<|start|>", "a", "<|end|>"])
    pieces, _ = stream(BYTE_LEVEL, ids, skip_special_tokens=skip)
    assert pieces == (["", "a", "", ""] if skip else ["<|start|>", "a", "<|end|>", ""])


def test_a_character_comes_whole_with_its_last_byte():
    for ids in (byte_ids("😀!".encode()), piece_ids(*"😀".encode(), 0x21)):
        tokenizer = BYTE_LEVEL if ids == byte_ids("😀!".encode()) else SENTENCEPIECE
        assert stream(tokenizer, ids)[0] == ["", "", "", "😀", "!", ""]


@BOTH
def test_an_incomplete_character_is_replaced_when_the_text_ends(tokenizer):
    ids = byte_ids("a😀".encode()[:-1]) if tokenizer is BYTE_LEVEL else piece_ids("x", 0xF0, 0x9F)
    pieces, detokenizer = stream(tokenizer, ids)
    assert "\ufffd" in pieces[-1]
    assert detokenizer.text == decode(tokenizer, ids)


@BOTH
def test_a_prompt_that_ends_within_a_character_is_not_repeated(tokenizer):
    first, second = "é".encode()
    if tokenizer is BYTE_LEVEL:
        prompt, ids = byte_ids([0x61, first]), byte_ids([second, 0x62])
    else:
        prompt, ids = piece_ids("x", first), piece_ids(second, "o")
    assert stream(tokenizer, ids, prompt)[1].text == decode(tokenizer, ids)


# -- what decode streams get wrong --------------------------------------------------------------


def test_a_run_of_bytes_that_turns_out_invalid_keeps_what_was_sent():
    ids = piece_ids("x", *"é".encode(), 0xFF, "▁a", "▁the")
    assert decode(SENTENCEPIECE, ids) == "x\ufffd\ufffd\ufffd a the"
    assert stream(SENTENCEPIECE, ids)[0] == ["x", "", "é", "", "\ufffd a", " the", ""]
    assert stream(SENTENCEPIECE, ids[:4])[1].text == "xé\ufffd"


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from([*WORDS[:7], "</s>", *range(0x80, 0x100)]), max_size=60))
def test_stray_bytes_never_harm_the_words_around_them(pieces):
    ids = piece_ids(*pieces)

    def words(text):
        return "".join(char for char in text if char.isascii())

    assert words(stream(SENTENCEPIECE, ids)[1].text) == words(decode(SENTENCEPIECE, ids))


@BOTH
def test_a_long_run_of_stray_bytes_does_not_pile_up(tokenizer):
    ids = byte_ids(b"\xff" * 300) if tokenizer is BYTE_LEVEL else piece_ids(*[0xFF] * 300)
    detokenizer = Detokenizer(tokenizer, [], SamplingParams())
    for count, token_id in enumerate(ids, 1):
        detokenizer.append(token_id)
        assert count - len(detokenizer.text) <= 16
    detokenizer.finish()
    assert detokenizer.text == decode(tokenizer, ids) == "\ufffd" * 300


def test_a_long_run_of_skipped_tokens_does_not_lose_the_next_space():
    ids = piece_ids("▁the", *["</s>"] * 100, "▁a")
    assert stream(SENTENCEPIECE, ids)[1].text == "the a"


# -- stop strings -------------------------------------------------------------------------------


def cut(text, stops, include=False):
    """``text`` up to the stop string whose end comes first, the longest of those."""
    hits = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not hits:
        return text, None
    end, _, stop = min(hits)
    return text[: end if include else end - len(stop)], stop


@st.composite
def stopped_texts(draw):
    ids = draw(st.lists(st.integers(2, len(BYTE_LEVEL) - 1), min_size=1, max_size=40))
    text, stops = decode(BYTE_LEVEL, ids), []
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, max(0, len(text) - 1)))
        stop = text[start : start + draw(st.integers(1, 12))]
        stop += draw(st.sampled_from(["", "", "never"]))
        stops += [stop] if stop else []
    return ids, text, stops


@settings(max_examples=400, deadline=None)
@given(stopped_texts(), st.booleans())
def test_the_text_ends_at_the_stop_string_that_is_complete_first(case, include):
    ids, text, stops = case
    _, detokenizer = stream(BYTE_LEVEL, ids, stop=stops, include_stop_str_in_output=include)
    assert (detokenizer.text, detokenizer.stopped) == cut(text, stops, include)


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    st.lists(st.text("abc", max_size=5), max_size=8),
)
def test_stop_strings_are_found_however_the_text_is_cut_and_no_more_is_held(stops, pieces):
    matcher, text = StopStrings(stops), ""
    for piece in pieces:
        found = matcher.find(piece, armed=True)
        expected, stop = cut(text + piece, stops)
        if found is not None:
            assert (len(text) + found[0], found[1]) == (len(expected) + len(stop), stop)
            return
        assert stop is None
        text += piece
        starts = [n for n in range(1, 5) for stop in stops if text.endswith(stop[:n])]
        assert matcher.num_held == max(starts, default=0)


def test_text_is_held_only_while_it_can_become_a_stop_string():
    pieces, detokenizer = stream(BYTE_LEVEL, byte_ids(b"a<b<en<end>z"), stop="<end>")
    assert pieces == ["a", "", "<b", "", "", "", "<en", "", "", "", "", ""]
    assert (detokenizer.text, detokenizer.stopped) == ("a<b<en", "<end>")


def test_what_was_held_comes_when_the_output_ends_otherwise():
    pieces, detokenizer = stream(BYTE_LEVEL, byte_ids(b"a<en"), stop=["<end>", "zz"])
    assert pieces == ["a", "", "", "", "<en"]
    assert detokenizer.stopped is None


def test_stop_strings_do_not_count_before_min_tokens():
    ids = byte_ids(b"xyxxyz")
    assert stream(BYTE_LEVEL, ids, stop="xy", min_tokens=2)[1].text == ""
    assert stream(BYTE_LEVEL, ids, stop="xy", min_tokens=3)[1].text == "xyx"
    assert stream(BYTE_LEVEL, ids, stop="xy", min_tokens=6)[1].text == "xyxxyz"


def test_nothing_follows_a_stop_string():
    detokenizer = stream(BYTE_LEVEL, byte_ids(b"ab"), stop="b")[1]
    assert detokenizer.finish() == ""
    with pytest.raises(ValueError, match="ended with the stop string 'b'"):
        detokenizer.append(5)


def test_a_tokenizer_that_cannot_stream_is_refused():
    with pytest.raises(ValueError, match="str cannot decode incrementally"):
        Detokenizer("tokenizer", [], SamplingParams())
