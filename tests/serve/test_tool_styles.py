"""Which style of tool calls a chat template asks for, and what it is allowed to do."""

from __future__ import annotations

import openai
import pytest
from server_process import start_server
from tool_models import HERMES_TEMPLATE, LLAMA_TEMPLATE, MESSAGES, ask, check, guided, write_model
from transformers import AutoTokenizer

from pageloom.config import load_config
from pageloom.engine.prompts import PromptEncoder
from pageloom.errors import PageloomError
from pageloom.plugins import Plugins
from pageloom.serve.calls import ToolStyle


def test_llama_calls_by_special_tokens(tmp_path):
    config = write_model(tmp_path, LLAMA_TEMPLATE, special=["<|python_tag|>"])
    call = r'\{"name": "f", "parameters": \{"a": [0-9]\}\}'
    with (
        start_server(config) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client,
    ):
        (choice,) = ask(client, **guided(f"{call}; {call}")).choices
        assert [c.function.name for c in choice.message.tool_calls] == ["f", "f"]
        (choice,) = ask(client, **guided(r'\{"name": "Bob"\}')).choices
        assert choice.message.content == '{"name": "Bob"}'
        (required,) = ask(client, tool_choice="required", parallel_tool_calls=False).choices
        check(required.message.tool_calls[0].function)


@pytest.mark.parametrize(
    ("template", "special", "style", "shows"),
    [
        (HERMES_TEMPLATE, [], "hermes", False),
        (HERMES_TEMPLATE, ["<tool_call>"], "hermes", True),
        (LLAMA_TEMPLATE, ["<|python_tag|>"], "llama3_json", True),
    ],
)
def test_the_chat_template_tells_the_style(tmp_path, template, special, style, shows):
    write_model(tmp_path, template, special)
    found = ToolStyle.of(Plugins.load(), "auto", AutoTokenizer.from_pretrained(tmp_path))
    assert (found.name, found.shows_special_tokens) == (style, shows)


def test_a_template_of_two_styles_needs_a_choice(tmp_path):
    config = write_model(tmp_path, HERMES_TEMPLATE + LLAMA_TEMPLATE)
    tokenizer, plugins = AutoTokenizer.from_pretrained(tmp_path), Plugins.load()
    with pytest.raises(PageloomError, match=r"hermes or llama3_json; say which by server\.tool_"):
        ToolStyle.of(plugins, "auto", tokenizer)
    chosen = load_config(str(config), ["server.tool_parser=hermes"]).server.tool_parser
    assert ToolStyle.of(plugins, chosen, tokenizer).name == "hermes"
    with pytest.raises(PageloomError, match=r"did you mean hermes\?"):
        load_config(str(config), ["server.tool_parser=hermess"])


def test_of_several_templates_the_one_for_tools_counts(tmp_path):
    write_model(tmp_path, "")
    tokenizer, plugins = AutoTokenizer.from_pretrained(tmp_path), Plugins.load()
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": HERMES_TEMPLATE}
    assert ToolStyle.of(plugins, "auto", tokenizer).name == "hermes"
    tokenizer.chat_template = {"rag": HERMES_TEMPLATE}
    assert ToolStyle.of(plugins, "auto", tokenizer) is None


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append.__globals__ }}",
        "{% set _ = messages.append(1) %}",
        "{% for i in range(10 ** 9) %}a{% endfor %}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(offline, template):
    tokenizer = AutoTokenizer.from_pretrained(offline.tokenizer.name_or_path)
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match="the chat template refuses the messages"):
        PromptEncoder(tokenizer, 300, 100).render_chat(MESSAGES)
