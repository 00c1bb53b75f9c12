"""The fields of the API that ask for an output of a certain form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field

from pageloom.scheduling.structured import MAX_STRUCTURED_CHARS, StructuredOutput
from pageloom.serve.errors import APIError
from pageloom.serve.fields import Fields

MAX_CHOICES = 4096

Text = Annotated[str, Field(max_length=MAX_STRUCTURED_CHARS)]
Schema = str | dict[str, Any]
Choices = Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES)]


class NamedSchema(Fields):
    """``response_format.json_schema``"""

    name: Annotated[str, Field(max_length=64)]
    description: str | None = None
    """For people; the model is not told."""
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None
    """Whatever it says, the output follows the schema."""


class ResponseFormat(Fields):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class StructuredOutputs(Fields):
    """vLLM's ``structured_outputs``; exactly one of them."""

    json_: Schema | None = Field(default=None, alias="json")
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    json_object: Literal[True] | None = None


class StructuredFields(Fields):
    """What the output is to look like; at most one of them."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    """vLLM's newer name for what follows."""
    guided_json: Schema | None = None
    """A JSON schema."""
    guided_regex: Text | None = None
    """For the whole output, in the syntax of Rust's ``regex``."""
    guided_choice: Choices | None = None
    """Texts, one of which the output is."""
    guided_grammar: Text | None = None
    """In llguidance's variant of Lark; it begins with the rule ``start``."""

    def structured(self) -> tuple[str, StructuredOutput] | None:
        """The field that asks for a form, and the form; None if none does. Raises `APIError`."""
        found = [(name, value) for name in FORMS if (value := getattr(self, name)) is not None]
        found = [(n, v) for n, v in found if n != "response_format" or v.type != "text"]
        if not found:
            return None
        if len(found) > 1:
            names = " and ".join(name for name, _ in found)
            raise APIError(f"{names} ask for different things; send one", param=found[1][0])
        name, value = found[0]
        try:
            return name, FORMS[name](value)
        except ValueError as error:
            raise refused(name, error) from error


def refused(field: str, error: ValueError) -> APIError:
    """What the engine's own checks say, in the words of the request."""
    message = str(error).replace("structured", field, 1).replace("beam_width", "use_beam_search", 1)
    return APIError(message, param=field, code="invalid_grammar")


def _of_response_format(wanted: ResponseFormat) -> StructuredOutput:
    if wanted.type == "json_object":
        if wanted.json_schema is not None:
            raise ValueError("structured has a json_schema, but is of type json_object")
        return StructuredOutput.json()
    if wanted.json_schema is None:
        raise ValueError("structured is of type json_schema, but has no json_schema")
    return StructuredOutput.json(wanted.json_schema.schema_)


def _of_structured_outputs(wanted: StructuredOutputs) -> StructuredOutput:
    sent = [name for name in STRUCTURED_OUTPUTS if getattr(wanted, name) is not None]
    if len(sent) != 1:
        names = ", ".join(name.rstrip("_") for name in STRUCTURED_OUTPUTS)
        raise ValueError(f"structured must have exactly one of {names}; it has {len(sent)}")
    return STRUCTURED_OUTPUTS[sent[0]](getattr(wanted, sent[0]))


def _any_object(_: bool) -> StructuredOutput:
    return StructuredOutput.json()


STRUCTURED_OUTPUTS: dict[str, Callable[[Any], StructuredOutput]] = {
    "json_": StructuredOutput.json,
    "regex": StructuredOutput.regex,
    "choice": StructuredOutput.choice,
    "grammar": StructuredOutput.grammar,
    "json_object": _any_object,
}
FORMS: dict[str, Callable[[Any], StructuredOutput]] = {
    "response_format": _of_response_format,
    "structured_outputs": _of_structured_outputs,
    "guided_json": StructuredOutput.json,
    "guided_regex": StructuredOutput.regex,
    "guided_choice": StructuredOutput.choice,
    "guided_grammar": StructuredOutput.grammar,
}
