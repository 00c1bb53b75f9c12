"""The parsers that come with Pageloom keep the contract."""

from __future__ import annotations

import inspect
import textwrap

from pageloom.contract import tools as tools_contract
from pageloom.testing import ToolParserSuite, tool_parser_suite


class TestHermes(ToolParserSuite):
    parser = "hermes"
    chat_template = '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}'
    texts = (
        '<tool_call>{"arguments": {"a": "</tool_call>"}, "name": "f"}',
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        '<tool_call>{"id": [1, {}], "name": "f"}</tool_call>',
        '<tool_call>{"name": 3}</tool_call>',
        "see <tool_call> [] </tool_call> ",
    )


class TestLlama3(ToolParserSuite):
    parser = "llama3_json"
    chat_template = '{{ "<|python_tag|>" }} Say {"name": NAME, "parameters": PARAMETERS}.'
    texts = (
        '<|python_tag|>{"name": "f", "parameters": {"a": "}; {"}}; ',
        '{"type": "function", "name": "f", "parameters": {}}\n',
        '{"name": "f", "arguments": "{}"}, {"name": "Bob", "age": 3}',
        '{"name": "Bob", "age": 3}',
        "<|python_tag|>print(1)",
    )


def documented(text: str, file: str, until: str) -> dict:
    """What a file defines that stands in a docstring."""
    source = text.split(f"``{file}``::\n", 1)[1].split(until, 1)[0]
    namespace = {"__name__": "example"}
    exec(compile(textwrap.dedent(source), file, "exec"), namespace)
    return namespace


class TestShout(
    documented(inspect.getdoc(tool_parser_suite), "test_shout.py", "\nThen ``pytest``")["TestShout"]
):
    """The example of the contract, as that of the suite tests it."""

    parser = documented(inspect.getdoc(tools_contract), "pageloom_shout.py", "\nThen ``server:")[
        "ShoutParser"
    ]
