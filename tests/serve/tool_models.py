"""Models with chat templates that call tools, and how tests ask them."""

from __future__ import annotations

import json

from tokenizers import AddedToken
from transformers import AutoTokenizer

from tiny_text_model import SPECIAL, write_tiny_model

NUM_TOKENS = 256 + len(SPECIAL)
HERMES_TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Write <tool_call>{"name": NAME, "arguments": ARGUMENTS}</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LLAMA_TEMPLATE = HERMES_TEMPLATE.replace("<tool_call>", "<|python_tag|>").replace(
    "arguments", "parameters"
)
MESSAGES = [{"role": "user", "content": "How warm is it?"}]
UNITS = {"type": "string", "enum": ["celsius", "kelvin"]}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of today.",
        "parameters": {
            "type": "object",
            "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 99}, "in": UNITS},
            "required": ["days", "in"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "get-clock.v2"}}
TOOLS = [WEATHER, CLOCK]
CALL = (
    r'<tool_call>\n\{"name": "[a-z]{3}", "arguments": \{"a": \[[1-9][0-9]{0,8}\]\}\}\n</tool_call>'
)


def write_model(folder, template, special=()):
    config = write_tiny_model(folder, vocab_size=NUM_TOKENS + len(special))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    tokenizer.add_tokens([AddedToken(text, special=True) for text in special])
    tokenizer.save_pretrained(folder)
    return config


def ask(client, **fields):
    defaults = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "seed": 1, "max_tokens": 600}
    return client.chat.completions.create(**defaults | fields)


def guided(pattern):
    """The random model has to say something: what is asked for is as the real ones say it."""
    return {"extra_body": {"guided_regex": pattern}}


def check(function):
    arguments = json.loads(function.arguments)
    if function.name == "weather":
        assert set(arguments) == {"days", "in"}
        assert 1 <= arguments["days"] <= 99
        assert arguments["in"] in UNITS["enum"]
    else:
        assert function.name == "get-clock.v2"
        assert arguments == {}
