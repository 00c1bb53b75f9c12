"""What an output has to look like, and who sees to it token by token."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

from pageloom.scheduling.errors import RequestError

Kind = Literal["json", "regex", "choice", "grammar"]
KINDS: tuple[Kind, ...] = get_args(Kind)
MAX_STRUCTURED_CHARS = 1 << 16
MAX_SHOWN = 80  # characters


class GuideError(RuntimeError):
    """A guide cannot say what may follow; its output cannot go on."""


class Guide(Protocol):
    """Says which tokens may follow in one output. Used by one thread at a time."""

    @property
    def finished(self) -> bool:
        """Whether the text is complete and nothing may follow, so that the output ends here."""

    def mask(self) -> bytes:
        """A bit for each token of the vocabulary, 1 for those that may follow: token ``i`` is bit
        ``i % 8`` of byte ``i // 8``, counted from the lowest; what is left out may not follow.
        An end-of-sequence token may follow where the text is complete. Raises `GuideError`."""

    def advance(self, token_id: int) -> None:
        """Take in the token that was drawn."""

    def fork(self) -> Guide:
        """Another guide of the same text so far."""


@dataclass(frozen=True)
class StructuredOutput:
    """The form of an output, as plain data. Checked when made: `RequestError` says what is wrong.

    Whether the text can be compiled is found out when a request is opened.
    """

    kind: Kind
    """What ``text`` is: "json", a JSON schema; "regex", a regular expression (of Rust's crate
    ``regex``) for the whole output; "choice", a JSON list of texts, one of which the output is;
    "grammar", a context-free grammar in llguidance's variant of Lark, from its rule ``start``."""

    text: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise RequestError.of(
                "structured", f"is of kind {self.kind!r}, but must be one of {KINDS}"
            )
        if not isinstance(self.text, str):
            raise RequestError.of("structured", f"has a text that is {type(self.text).__name__}")
        if len(self.text) > MAX_STRUCTURED_CHARS:
            raise RequestError.of(
                "structured",
                f"has a {self.kind} of {len(self.text):,} characters, but may have at most "
                f"{MAX_STRUCTURED_CHARS:,}",
            )
        if self.kind == "choice":
            _check_choices(self.text)

    def __repr__(self) -> str:
        """The text may be long, and errors and logs show this."""
        text = self.text if len(self.text) <= MAX_SHOWN else f"{self.text[:MAX_SHOWN]}..."
        return f"StructuredOutput({self.kind!r}, {text!r})"

    @classmethod
    def json(cls, schema: Mapping[str, Any] | str | None = None) -> StructuredOutput:
        """JSON that ``schema``, as text or as a value, describes; without one, any object."""
        if isinstance(schema, str):
            return cls("json", schema)
        return cls("json", json.dumps({"type": "object"} if schema is None else schema))

    @classmethod
    def regex(cls, pattern: str) -> StructuredOutput:
        return cls("regex", pattern)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> StructuredOutput:
        return cls("choice", json.dumps(list(texts)))

    @classmethod
    def grammar(cls, grammar: str) -> StructuredOutput:
        return cls("grammar", grammar)


def _check_choices(text: str) -> None:
    try:
        texts = json.loads(text)
    except ValueError as error:
        fault = f"has choices that are not valid JSON: {error}"
        raise RequestError.of("structured", fault) from error
    if not isinstance(texts, list) or not texts or not all(isinstance(t, str) for t in texts):
        raise RequestError.of("structured", "has choices that are not a list of one text or more")
