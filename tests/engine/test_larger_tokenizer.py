"""Tokenizers that have more tokens than their model."""

from __future__ import annotations

import re

import pytest
from tokenizers import AddedToken, Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from pageloom import Engine, SamplingParams, StructuredOutput
from pageloom.engine.tokenizer_spec import tokenizer_json
from tiny_text_model import write_tiny_model


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("larger")
    config = write_tiny_model(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([AddedToken("<pad>", special=True), "<b>"])
    tokenizer.save_pretrained(folder)
    engine = Engine.from_config(config)
    assert len(engine.tokenizer) == engine.prompts.vocab_size + 2
    return engine


def test_a_form_is_kept_by_tokens_that_the_model_has(engine):
    wanted = StructuredOutput.regex("(<b>|<pad>){4}")
    (output,) = engine.generate("Say:", SamplingParams(structured=wanted, max_tokens=99))[0].outputs
    assert re.fullmatch(wanted.text, output.text)
    assert max(output.token_ids) < engine.prompts.vocab_size


def test_a_prompt_has_only_tokens_that_the_model_has(engine):
    for text in ("a<pad>", "<b>"):
        with pytest.raises(ValueError, match="but the model has 259 tokens only"):
            engine.generate(text)
    assert engine.generate("a<pa", SamplingParams(max_tokens=1))[0].outputs[0].token_ids


WORDS = {"a": 0, "b": 1, "c": 2, "ab": 3, "bc": 4, "abc": 5, "cc": 6}
BPE = models.BPE(WORDS, [("a", "b"), ("b", "c"), ("ab", "c"), ("c", "c")])
PREFIXED = models.BPE(
    {"a": 0, "b": 1, "#b": 2, "#c": 3, "ab": 4, "#bc": 5, "abc": 6},
    [("a", "#b"), ("#b", "#c"), ("ab", "#c")],
    continuing_subword_prefix="#",
)
UNIGRAM = models.Unigram([("<unk>", 0.0), ("a", -1.0), ("b", -2.0), ("ab", -3.0)], 0)
WORDPIECE = models.WordPiece(WORDS | {"##c": 7}, unk_token="a")


@pytest.mark.parametrize(
    ("model", "vocab_size"), [(BPE, 4), (BPE, 5), (PREFIXED, 5), (UNIGRAM, 3), (WORDPIECE, 6)]
)
def test_what_is_left_is_a_tokenizer_of_its_own(model, vocab_size):
    whole = Tokenizer(model)
    whole.add_special_tokens(["<pad>"])
    spec = tokenizer_json(PreTrainedTokenizerFast(tokenizer_object=whole), vocab_size)
    left = Tokenizer.from_str(spec)
    assert sorted(left.get_vocab().values()) == list(range(vocab_size))
    assert left.get_vocab().items() <= whole.get_vocab().items()
    assert left.encode("ab").tokens == whole.encode("ab").tokens or vocab_size == 3


def test_a_tokenizer_that_fits_is_left_as_it_is():
    fitting = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE))
    assert tokenizer_json(fitting, 7) == fitting.backend_tokenizer.to_str()
    assert tokenizer_json(None, 7) is None
