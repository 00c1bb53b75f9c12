"""What every tool parser must do, as a pytest suite to inherit.

For a package that has the parser of `pageloom.contract.tools`'s example, two files more.
``pyproject.toml``::

    [project.optional-dependencies]
    test = ["pageloom[testing]"]

``test_shout.py``::

    from pageloom.testing import ToolParserSuite

    class TestShout(ToolParserSuite):
        parser = "shout"
        chat_template = "To call a tool, say CALL NAME WORD. {{ messages }}"
        tools = [{"name": "weather", "parameters": {"properties": {"word": {"type": "string"}}}}]
        several = False
        texts = ["CALL weather Paris", "CALL me", "CALL"]

Then ``pytest``. The texts that it reads are those that the parser's own grammar allows, and what
becomes of them when they are cut, mixed and broken.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import accumulate
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from pageloom.contract import CallPiece, ToolParser
from pageloom.plugins import Plugins

_explored = settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow],
)
_TOOLS: Sequence[Mapping[str, Any]] = (
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
)
_END = "<|end|>"
_WALKS = 12
_MOST_TOKENS = 2000
_ADDED = ("no marker is a token", "markers are tokens", "markers are special tokens")
_WORDS = (
    "Let",
    "me",
    "see:",
    "it",
    "is",
    "(almost)",
    "23.5",
    "Grad",
    "in",
    "Zürich,",
    "天气",
    "😀",
)
_BITS = ("{", "}", "[", "]", '"', "\\", ":", ",", ";", "<", "|", ">", "=", "\n", " ", "a", "ü", "1")

Call = tuple[str, str]  # the name, and the arguments as JSON


class ToolParserSuite:
    """Inherit it in a class named ``Test...`` and say which parser."""

    parser: ClassVar[str | type[ToolParser]]
    """A registered name, or a class that is not registered."""

    chat_template: ClassVar[str]
    """Of a model that calls tools in this style."""

    tools: ClassVar[Sequence[Mapping[str, Any]]] = _TOOLS
    """What is called, each with ``name`` and ``parameters``. Where the schemas leave room, texts
    are drawn at random: without bounds, they have no end."""

    several: ClassVar[bool] = True
    """Whether an output may have several calls, if a client has nothing against it."""

    texts: ClassVar[Sequence[str]] = ()
    """What else is to be read, whole and in parts: what models say in this style, or almost."""

    def test_the_chat_template_tells_the_style(self) -> None:
        found = self.style().detect(self.chat_template)
        assert found is True
        for other in ("", "{% for message in messages %}{{ message.content }}{% endfor %}"):
            assert self.style().detect(other) is False

    @pytest.mark.parametrize("parallel", [False, True], ids=["one call", "one or more"])
    @pytest.mark.parametrize("added", _ADDED)
    def test_what_the_grammar_allows_is_read_as_calls(self, added: str, parallel: bool) -> None:
        """Each of a tool that there is, with arguments that follow its schema, and no text."""
        from jsonschema_rs import is_valid

        schemas = {tool["name"]: tool["parameters"] for tool in self.tools}
        counts, names = set(), set()
        for text in walks(self.style(), self.tools, parallel, added):
            said, calls = read(self.style()(), [text])
            assert not said.strip(), f"{text!r} is said to have the text {said!r}"
            assert calls, f"{text!r} is said to have no call"
            counts.add(len(calls))
            for name, arguments in calls:
                assert name in schemas
                names.add(name)
                value = json.loads(arguments)
                assert isinstance(value, dict)
                assert is_valid({"type": "object", **schemas[name]}, value), (name, arguments)
        assert names == schemas.keys()
        assert max(counts) > 1 if parallel and self.several else counts == {1}

    def test_each_tool_can_be_the_only_one(self) -> None:
        for tool in self.tools:
            for text in walks(self.style(), [tool], False, _ADDED[0]):
                assert [name for name, _ in read(self.style()(), [text])[1]] == [tool["name"]]

    def test_there_may_be_many_tools_with_any_names(self) -> None:
        letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-"
        names = [letter * 64 for letter in letters] + [f"a{n}" for n in range(128 - len(letters))]
        tools = [{**self.tools[0], "name": name} for name in names]
        for text in walks(self.style(), tools, False, _ADDED[0]):
            assert read(self.style()(), [text])[1][0][0] in names

    def test_a_wrong_schema_is_left_for_others_to_find(self) -> None:
        wrong = {"required": "a", "properties": [], "$ref": "#/nowhere", "maximum": '"}'}
        grammar = self.style().grammar([{"name": "f", "parameters": wrong}], True, [])
        assert isinstance(grammar, str)

    @_explored
    @given(words=st.lists(st.sampled_from(_WORDS), max_size=8))
    def test_prose_is_text_all_of_it(self, words: list[str]) -> None:
        text = " ".join(words)
        assert read(self.style()(), text) == (text, [])

    @_explored
    @given(data=st.data())
    def test_any_split_of_any_text_gives_the_same(self, data: st.DataObject) -> None:
        parts = data.draw(self.any_parts())
        text, ends = "".join(parts), list(accumulate(map(len, parts), initial=0))
        somewhere = st.one_of(st.sampled_from(ends), st.integers(0, len(text)))
        cuts = sorted(data.draw(st.lists(somewhere, max_size=12)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        whole = read(self.style()(), [text])
        assert read(self.style()(), pieces) == whole
        assert read(self.style()(), text) == whole, "a character at a time"

    @_explored
    @given(data=st.data())
    def test_no_text_is_lost_or_made_up(self, data: st.DataObject) -> None:
        """Without calls, it is as it was; with them, what is said was there, in this order."""
        text = "".join(data.draw(self.any_parts()))
        said, calls = read(self.style()(), [text])
        if not calls:
            assert said == text
        rest = iter(text)
        assert all(char in rest for char in said), f"{said!r} does not stand in {text!r}"

    @_explored
    @given(words=st.lists(st.sampled_from(_WORDS), min_size=1, max_size=4), data=st.data())
    def test_what_is_said_beside_a_call_is_not_lost(
        self, words: list[str], data: st.DataObject
    ) -> None:
        prose, call = " ".join(words), data.draw(st.sampled_from(self.calls()))
        for text in (f"{prose}\n{call}", f"{call}\n{prose}"):
            said, calls = read(self.style()(), [text])
            values = [json.dumps(json.loads(each), ensure_ascii=False) for _, each in calls]
            assert any(prose in found for found in (said, *values)), text

    # What the tests are made of.

    @classmethod
    def style(cls) -> type[ToolParser]:
        for name, example in (("parser", '"name"'), ("chat_template", '"..."')):
            if not hasattr(cls, name):
                raise TypeError(
                    f"{cls.__name__} must say which parser it tests: {name} = {example}"
                )
        if isinstance(cls.parser, str):
            found: type[ToolParser] = _plugins().get("tool_parser", cls.parser)
            return found
        return cls.parser

    @classmethod
    def calls(cls) -> list[str]:
        """Texts that are calls and nothing else."""
        return walks(cls.style(), cls.tools, True, _ADDED[0])

    @classmethod
    def any_parts(cls) -> st.SearchStrategy[list[str]]:
        """Of a text: calls, `texts` and parts of them, markers, prose and much else."""
        sample = st.sampled_from([*cls.calls(), *cls.texts])
        part = st.tuples(sample, st.floats(0, 1), st.floats(0, 1)).map(_part)
        bit = st.sampled_from([*_BITS, *_WORDS, *cls.style().markers])
        return st.lists(st.one_of(sample, part, bit, st.text(max_size=4)), max_size=10)


def read(parser: ToolParser, texts: Iterable[str]) -> tuple[str, list[Call]]:
    """The text and the calls, put together from what a parser returns."""
    pieces = [piece for text in texts for piece in parser.feed(text)] + list(parser.finish())
    said, names, arguments = "", list[str](), list[str]()
    for piece in pieces:
        if isinstance(piece, str):
            said += piece
            continue
        assert isinstance(piece, CallPiece), f"{piece!r} is neither text nor a piece of a call"
        if piece.index == len(names):
            assert piece.name, "the first piece of a call must have its name"
            names.append(piece.name)
            arguments.append(piece.arguments)
        else:
            assert 0 <= piece.index < len(names), "calls must be numbered as they begin"
            assert piece.name is None, "only the first piece of a call may have its name"
            arguments[piece.index] += piece.arguments
    return said, list(zip(names, arguments, strict=True))


def walks(
    style: type[ToolParser], tools: Sequence[Mapping[str, Any]], parallel: bool, added: str
) -> list[str]:
    """Texts that the grammar for calls of ``tools`` allows, drawn at random."""
    markers = () if added == _ADDED[0] else tuple(style.markers)
    grammar = style.grammar(tools, parallel, [_END, *markers])
    return _walks(grammar, markers, added == _ADDED[2])


@cache
def _walks(grammar: str, markers: tuple[str, ...], special: bool) -> list[str]:
    from llguidance import LLMatcher, LLTokenizer

    tokenizer = _tokenizer(markers, special)
    known = LLTokenizer(tokenizer.to_str(), n_vocab=tokenizer.get_vocab_size(), eos_token=[0])
    matcher = LLMatcher(known, LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), f"{matcher.get_error()}\n{grammar}"
    return [_walk(matcher.deep_copy(), tokenizer, seed) for seed in range(_WALKS)]


def _walk(matcher: Any, tokenizer: Tokenizer, seed: int) -> str:
    """Ends early rather than late."""
    rng, token_ids = random.Random(seed), list[int]()
    while not matcher.is_stopped() and len(token_ids) < _MOST_TOKENS:
        mask = matcher.compute_bitmask()
        allowed = [i for i in range(8 * len(mask)) if mask[i // 8] >> i % 8 & 1]
        token = 0 if 0 in allowed and rng.random() < 0.5 else rng.choice(allowed)
        matcher.consume_token(token)
        token_ids += [token] if token else []
    text = str(tokenizer.decode(token_ids, skip_special_tokens=False))
    assert matcher.is_stopped(), f"the grammar allows a text without end: {text[:300]!r}"
    return text


def _tokenizer(markers: Sequence[str], special: bool) -> Tokenizer:
    """A token for each byte, and one for each marker."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    found = Tokenizer(models.BPE({token: i for i, token in enumerate([_END, *letters])}, []))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    found.add_special_tokens([_END])
    found.add_tokens([AddedToken(marker, special=special) for marker in markers])
    return found


def _part(drawn: tuple[str, float, float]) -> str:
    text, *ends = drawn
    first, last = sorted(round(end * len(text)) for end in ends)
    return text[first:last]


@cache
def _plugins() -> Plugins:
    return Plugins.load()
