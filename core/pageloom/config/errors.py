"""How a wrong configuration is reported: every problem at once, each with its place."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pageloom.errors import PageloomError, shorten

ABSENT: Any = object()
"""Stands for "there is no value", where None is a value."""


@dataclass(frozen=True)
class Problem:
    """One thing wrong in a configuration."""

    key: str  # full key, "" when the file itself is the problem
    where: str  # "file:line", "--set KEY=VALUE", or a file
    reason: str = ""  # what is wrong, where `expected` does not say it all
    value: Any = ABSENT  # as the user wrote it
    expected: str = ""
    nearest: str = ""  # the valid name that was probably meant

    def __str__(self) -> str:
        subject = self.key
        if self.value is not ABSENT:
            subject += f" = {show(self.value)}"
        said = [self.reason, f"expected {self.expected}" if self.expected else ""]
        said.append(f"did you mean {self.nearest}?" if self.nearest else "")
        return ": ".join(
            part for part in (self.where, subject, "; ".join(filter(None, said))) if part
        )


class ConfigError(PageloomError):
    """The configuration cannot be used. ``problems`` holds everything that is wrong with it."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__(self._text())

    def _text(self) -> str:
        if len(self.problems) == 1:
            return str(self.problems[0])
        lines = [f"{len(self.problems)} problems in the configuration:"]
        return "\n  ".join(lines + [str(problem) for problem in self.problems])


def show(value: Any) -> str:
    """A value as YAML users write it, cut to one short line."""
    try:
        return shorten(json.dumps(value, default=str, ensure_ascii=False))
    except ValueError:  # Python refuses to print an integer of thousands of digits
        return f"(a {type(value).__name__} that is too long to show)"
