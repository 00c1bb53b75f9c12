"""What the grammar of a required call allows, the parser reads as calls that follow the schema."""

from __future__ import annotations

import json
import random

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from pageloom.contract import CallPiece
from pageloom_tools.hermes import HermesParser
from pageloom_tools.llama3 import Llama3Parser

END = "<|end|>"
TOOLS = [
    {
        "name": "weather",
        "parameters": {
            "$defs": {"unit": {"enum": ["°C", '"K"\\']}},
            "properties": {
                "days": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
                "unit": {"$ref": "#/$defs/unit"},
            },
            "required": ["days", "unit"],
            "additionalProperties": False,
        },
    },
    {"name": "get-clock.v2", "parameters": {"type": "object", "additionalProperties": False}},
]


def tokenizer_with(markers, special):
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    found = Tokenizer(models.BPE({token: i for i, token in enumerate([END, *letters])}, []))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    found.add_special_tokens([END])
    found.add_tokens([AddedToken(marker, special=special) for marker in markers])
    return found


def walk(grammar, tokenizer, seed, most=400):
    """A text that the grammar allows, which ends early rather than late."""
    ll = LLTokenizer(tokenizer.to_str(), n_vocab=tokenizer.get_vocab_size(), eos_token=[0])
    matcher = LLMatcher(ll, LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    rng, token_ids = random.Random(seed), []
    while not matcher.is_stopped() and len(token_ids) < most:
        mask = matcher.compute_bitmask()
        allowed = [i for i in range(8 * len(mask)) if mask[i // 8] >> i % 8 & 1]
        token = 0 if 0 in allowed and rng.random() < 0.5 else rng.choice(allowed)
        matcher.consume_token(token)
        token_ids += [token] if token else []
    assert matcher.is_stopped()
    return tokenizer.decode(token_ids, skip_special_tokens=False)


def calls_in(parser, text):
    pieces = [*parser.feed(text), *parser.finish()]
    assert all(isinstance(piece, CallPiece) for piece in pieces if piece)
    calls = {}
    for piece in filter(None, pieces):
        name, arguments = calls.get(piece.index, (piece.name, ""))
        calls[piece.index] = name, arguments + piece.arguments
    return [(name, json.loads(arguments)) for name, arguments in calls.values()]


@pytest.mark.parametrize("added", ["none", "plain", "special"])
@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("parser", [HermesParser, Llama3Parser])
def test_a_required_call_is_read_as_one(parser, parallel, added):
    markers = [] if added == "none" else parser.markers
    tokenizer = tokenizer_with(markers, special=added == "special")
    grammar = parser.grammar(TOOLS, parallel, [END, *markers])
    counts, names = set(), set()
    for seed in range(12):
        calls = calls_in(parser(), walk(grammar, tokenizer, seed))
        counts.add(len(calls))
        for name, arguments in calls:
            names.add(name)
            assert set(arguments) == ({"days", "unit"} if name == "weather" else set())
            assert arguments.get("unit") in (None, "°C", '"K"\\')
    assert names == {"weather", "get-clock.v2"}
    assert counts == {1} if not parallel else max(counts) > 1
