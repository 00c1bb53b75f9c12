"""The suite fails parsers that break the contract, in the test that says why."""

from __future__ import annotations

import re

import pytest

from pageloom.testing import ToolParserSuite

pytest_plugins = ["pytester"]

PARSERS = r"""
import json
import re

from hypothesis import Phase, settings

from pageloom.contract import CallPiece, ToolParser
from pageloom.testing import ToolParserSuite

settings.register_profile("quick", phases=[Phase.generate])  # failures need not be shrunk
settings.load_profile("quick")


PARAMETERS = {"properties": {"word": {"type": "string"}}}


class Sound(ToolParser):
    # An output is text, or calls of tools that take a word, a line each: CALL weather paris
    line = r"CALL (\S+) ([a-z]+)"

    def __init__(self):
        self.said = ""

    @classmethod
    def detect(cls, chat_template):
        return "CALL" in chat_template

    @classmethod
    def grammar(cls, tools, parallel, tokens):
        names = " | ".join(json.dumps(tool["name"]) for tool in tools)
        more = r'("\n" call)*' if parallel else ""
        return f'start: call {more}\ncall: "CALL " ({names}) " " /[a-z]{{1,3}}/'

    def feed(self, text):
        self.said += text
        return []

    def finish(self):
        calls = [re.fullmatch(self.line, line) for line in self.said.split("\n")]
        if not all(calls):
            return [self.said]
        return [piece for n, call in enumerate(calls) for piece in self.call(n, call)]

    def call(self, index, found):
        arguments = json.dumps({"word": found[2]})
        yield CallPiece(index, found[1], arguments[:4])
        yield CallPiece(index, None, arguments[4:])


class KnowsEveryTemplate(Sound):
    @classmethod
    def detect(cls, chat_template):
        return "messages" in chat_template


class CannotReadItsOwnCalls(Sound):
    line = r"CALL (\S+) ([n-z]+)"


class AllowsWhatIsNoGrammar(Sound):
    @classmethod
    def grammar(cls, tools, parallel, tokens):
        return super().grammar(tools, parallel, tokens) + " ("


class AllowsSeveralCallsAlways(Sound):
    @classmethod
    def grammar(cls, tools, parallel, tokens):
        return super().grammar(tools, True, tokens)


class WritesArgumentsAnyhow(Sound):
    def call(self, index, found):
        yield CallPiece(index, found[1], json.dumps({"word": 3}))


class ReadsTheSchema(Sound):
    @classmethod
    def grammar(cls, tools, parallel, tokens):
        assert all("word" in tool["parameters"]["properties"] for tool in tools)
        return super().grammar(tools, parallel, tokens)


class ForgetsOtherTools(Sound):
    @classmethod
    def grammar(cls, tools, parallel, tokens):
        return super().grammar(tools[:1], parallel, tokens)


class ShortensNames(Sound):
    line = r"CALL (\S{1,20})\S* ([a-z]+)"


class NamesEveryPiece(Sound):
    def call(self, index, found):
        for piece in super().call(index, found):
            yield CallPiece(piece.index, found[1], piece.arguments)


class TidiesUp(Sound):
    def finish(self):
        return [p.replace(" ", "") if isinstance(p, str) else p for p in super().finish()]


class JudgesPieceByPiece(Sound):
    def feed(self, text):
        return [text] if not self.said and not "CALL".startswith(text[:4]) else super().feed(text)


class LosesWhatIsNoCall(Sound):
    def finish(self):
        return [p for p in super().finish() if p != self.said or not p.startswith("CALL")]


class LosesWhatIsBesideACall(Sound):
    def finish(self):
        lines = [line for line in self.said.split("\n") if re.fullmatch(self.line, line)]
        self.said = "\n".join(lines) or self.said
        return super().finish()
"""

SUITE = """

class Test{0}(ToolParserSuite):
    parser = {0}
    chat_template = "CALL"
    tools = [{{"name": name, "parameters": PARAMETERS}} for name in "ab"]
    texts = ["CALL me", "CALL"]
"""

ALLOWED, TEXT = "test_what_the_grammar_allows_is_read_as_calls", "test_no_text_is_lost_or_made_up"
CAUGHT = {
    "KnowsEveryTemplate": "test_the_chat_template_tells_the_style",
    "CannotReadItsOwnCalls": ALLOWED,
    "AllowsWhatIsNoGrammar": ALLOWED,
    "AllowsSeveralCallsAlways": ALLOWED,
    "WritesArgumentsAnyhow": ALLOWED,
    "NamesEveryPiece": ALLOWED,
    "ForgetsOtherTools": ALLOWED,
    "ReadsTheSchema": "test_a_wrong_schema_is_left_for_others_to_find",
    "ShortensNames": "test_there_may_be_many_tools_with_any_names",
    "TidiesUp": "test_prose_is_text_all_of_it",
    "JudgesPieceByPiece": "test_any_split_of_any_text_gives_the_same",
    "LosesWhatIsNoCall": TEXT,
    "LosesWhatIsBesideACall": "test_what_is_said_beside_a_call_is_not_lost",
}


def test_each_fault_is_caught_where_it_belongs(pytester):
    classes = "".join(SUITE.format(name) for name in ["Sound", *CAUGHT])
    pytester.makepyfile(test_parsers=PARSERS + classes)
    wanted = [f"test_parsers.py::Test{name}::{test}" for name, test in CAUGHT.items()]
    command = ["-q", "-p", "no:cacheprovider", "--tb=no", "-rf", "test_parsers.py::TestSound"]
    result = pytester.runpytest_subprocess(*command, *wanted)
    failed = re.findall(r"^FAILED (test_parsers.py::\w+::\w+)", result.stdout.str(), re.M)
    assert set(failed) == set(wanted), result.stdout.str()
    assert result.parseoutcomes()["passed"] >= 13


def test_it_asks_for_what_it_has_to_know():
    class TestNothing(ToolParserSuite):
        pass

    with pytest.raises(TypeError, match=r'TestNothing must say which parser .*: parser = "name"$'):
        TestNothing().test_the_chat_template_tells_the_style()
