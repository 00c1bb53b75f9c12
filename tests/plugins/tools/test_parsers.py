"""Calls are found in the text of a model, however the text comes."""

from __future__ import annotations

import json

import pytest

from pageloom_tools.hermes import HermesParser
from pageloom_tools.llama3 import Llama3Parser

WEATHER = {"city": "Zürich", "days": [1, 2], "note": '</tool_call> "}{" \\ '}


def read(parser, *texts):
    """The text and the calls, put together from the pieces."""
    pieces = [piece for text in texts for piece in parser.feed(text)] + list(parser.finish())
    said, names, arguments = "", [], []
    for piece in pieces:
        if isinstance(piece, str):
            said += piece
        elif piece.name is not None:
            assert piece.index == len(names)  # calls begin in order, and with their names
            names.append(piece.name)
            arguments.append(piece.arguments)
        else:
            arguments[piece.index] += piece.arguments
    return said, list(zip(names, arguments, strict=True))


def hermes(name="weather", arguments=WEATHER):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def llama(name="weather", arguments=WEATHER):
    return json.dumps({"name": name, "parameters": arguments})


CALL = ("weather", json.dumps(WEATHER))
HERMES = [
    ("Paris, I think.\n", "Paris, I think.\n", []),
    (hermes(), "", [CALL]),
    (f"Let me see.\n\n{hermes()}\n", "Let me see.", [CALL]),
    (f"{hermes()}\n{hermes('clock', {})}", "", [CALL, ("clock", "{}")]),
    (f"{hermes()}{hermes()} done", " done", [CALL, CALL]),
    ('<tool_call>{"name":"f","arguments":{"a":1}}</tool_call>', "", [("f", '{"a":1}')]),
    ('<tool_call>{"arguments": {"a": 1}, "name": "f"}', "", [("f", '{"a": 1}')]),
    ('<tool_call>{"id": [1, {}], "name": "f"}</tool_call>', "", [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    (
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\\\n\\"}"}</tool_call>',
        "",
        [("f", r'{"a": "\n"}')],
    ),
    # The closing tag is missing, or a brace is; there is one too many.
    (f"<tool_call>{llama()}\n{hermes()}", "", [CALL, CALL]),
    ('<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call> x', " x", [("f", '{"a": 1}')]),
    ('<tool_call>{"name": "f", "arguments": {"a": 1}}}\n</tool_call>', "", [("f", '{"a": 1}')]),
    # Cut off.
    ('<tool_call>{"name": "f", "arguments": {"a": "b', "", [("f", '{"a": "b')]),
    ('a <tool_call>{"name": "f", "argu', 'a <tool_call>{"name": "f", "argu', []),
    ("a <tool_ca", "a <tool_ca", []),
    # No calls.
    ("a </tool_call> b", "a </tool_call> b", []),
    ("<tool_call> a b </tool_call>", "<tool_call> a b </tool_call>", []),
    ('<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', []),
    ("<tool_call>{}</tool_call>", "<tool_call>{}</tool_call>", []),
    (f"x <tool_call>[{hermes()}", "x <tool_call>[", [CALL]),
]
LLAMA = [
    ("Paris, I think.\n", "Paris, I think.\n", []),
    (llama(), "", [CALL]),
    (f"\n<|python_tag|>{llama()}", "", [CALL]),
    (f"{llama()}; {llama('clock', {})}", "", [CALL, ("clock", "{}")]),
    (f"{llama()}\n{llama()};", "", [CALL, CALL]),
    (f"{llama()} and more", " and more", [CALL]),
    ('{"type": "function", "name": "f", "parameters": {}}', "", [("f", "{}")]),
    ('{"name": "f", "arguments": {}}', "", [("f", "{}")]),
    ('{"name": "f", "parameters": {"a": [1', "", [("f", '{"a": [1')]),
    # An answer that is JSON, or speaks of it.
    ('{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
    (f"See: {llama()}", f"See: {llama()}", []),
    (f"  [{llama()}]", f"  [{llama()}]", []),
    ("{{ x }}", "{{ x }}", []),
    ("<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    ("<|pyth", "<|pyth", []),
    (f'{llama()}; {{"a": 1}}', '; {"a": 1}', [CALL]),
]
CASES = [(HermesParser, *case) for case in HERMES] + [(Llama3Parser, *case) for case in LLAMA]


@pytest.mark.parametrize(("parser", "text", "said", "calls"), CASES)
def test_text_and_calls_are_told_apart(parser, text, said, calls):
    assert read(parser(), text) == (said, calls)


@pytest.mark.parametrize(("parser", "text", "said", "calls"), CASES)
def test_a_character_at_a_time_gives_the_same(parser, text, said, calls):
    assert read(parser(), *text) == (said, calls)


@pytest.mark.parametrize("parser", [HermesParser, Llama3Parser])
def test_arguments_are_given_away_as_they_come(parser):
    text = hermes() if parser is HermesParser else llama()
    at = text.index('"days"')
    early = parser()
    (piece,) = early.feed(text[:at])
    assert (piece.index, piece.name) == (0, "weather")
    assert CALL[1].startswith(piece.arguments)
    assert piece.arguments.endswith(", ")


def test_text_is_not_kept_longer_than_it_may_be_a_call():
    assert HermesParser().feed("one < two <") == ["one < two"]
    assert Llama3Parser().feed("one {") == ["one {"]


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ('<tool_call>\n{"name": <function-name>, "arguments": <args>}', HermesParser),
        ("<tool_call>\n<function=example>\n<parameter=a> arguments", None),
        ('{{ \'<|python_tag|>\' }} {"name": , "parameters": }', Llama3Parser),
        ("{% for message in messages %}{{ message.content }}{% endfor %}", None),
    ],
)
def test_the_chat_template_tells_the_style(template, found):
    kinds = [kind for kind in (HermesParser, Llama3Parser) if kind.detect(template)]
    assert kinds == ([] if found is None else [found])
