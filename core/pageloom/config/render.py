"""A configuration as YAML that can be loaded again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import yaml

from pageloom.config.resolvers import escape
from pageloom.config.schema import Config

_COLUMN = 48


def render(config: Config) -> str:
    """The resolved configuration, every key with a comment that says where it came from. API keys
    are hidden."""
    lines = []
    for section, values in config.shown().items():
        lines.append(f"{section}:")
        lines += _lines(values, section, "  ", config.origins)
    return "\n".join(lines) + "\n"


def _lines(
    values: dict[str, Any], prefix: str, indent: str, origins: dict[str, str]
) -> Iterator[str]:
    for name, value in values.items():
        key = f"{prefix}.{name}"
        if isinstance(value, dict) and value:
            yield f"{indent}{_dump(name)}:"
            yield from _lines(value, key, indent + "  ", origins)
        else:
            text = f"{indent}{_dump(name)}: {_dump(escape(value))}"
            yield f"{text:<{_COLUMN}}  # {origins.get(key, 'default')}"


def _dump(value: Any) -> str:
    """One line of YAML."""
    dumped = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**9)
    text = dumped.removesuffix("\n").removesuffix("\n...")
    return json.dumps(value) if "\n" in text else text
