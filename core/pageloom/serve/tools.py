"""The fields of the API that describe tools and say which of them to call."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from pageloom.serve.errors import APIError
from pageloom.serve.fields import Fields

MAX_TOOLS = 128
FUNCTION_NAME = r"^[A-Za-z0-9_.-]{1,64}$"


NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


def _of_an_object(schema: dict[str, Any]) -> dict[str, Any]:
    if schema.get("type", "object") != "object":
        raise PydanticCustomError("parameters", 'must be a schema of type "object"')
    return schema


class Function(Fields):
    name: Annotated[str, Field(pattern=FUNCTION_NAME)]
    description: str | None = None
    parameters: Annotated[dict[str, Any], AfterValidator(_of_an_object)] | None = None
    """The JSON schema of its arguments, which are an object; without one, it takes none."""
    strict: bool | None = None
    """Whatever it says, calls that are required follow the schema, and others need not."""

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        return NO_ARGUMENTS if self.parameters is None else self.parameters


class Tool(Fields):
    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """As chat templates take it."""
        function = {"name": self.function.name, "parameters": self.function.schema_of_arguments}
        if self.function.description is not None:
            function["description"] = self.function.description
        return {"type": "function", "function": function}


class FunctionName(Fields):
    name: str


class NamedTool(Fields):
    type: Literal["function"]
    function: FunctionName


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS)]


class ToolFields(Fields):
    """Which tools the model may call, or must."""

    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    """``auto`` unless given; with ``none``, the model is told of no tools."""
    parallel_tool_calls: bool = True
    """Whether an answer may have several calls."""

    def usable_tools(self) -> list[Tool]:
        """Those that the model is told of. Raises `APIError` for a choice that cannot be."""
        tools = self.tools or []
        names = [tool.function.name for tool in tools]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise APIError(f"tools has two functions of the name {twice!r}", param="tools")
        if not tools and self.tool_choice not in (None, "none", "auto"):
            raise APIError("tool_choice needs tools to choose from", param="tool_choice")
        return [] if self.tool_choice == "none" else tools

    def required_tools(self) -> list[Tool]:
        """Those one of which has to be called; none if the model may answer as it likes. Raises
        `APIError`."""
        tools, choice = self.usable_tools(), self.tool_choice
        if choice == "required":
            return tools
        if not isinstance(choice, NamedTool):
            return []
        named = [tool for tool in tools if tool.function.name == choice.function.name]
        if not named:
            raise APIError(
                f"tool_choice names {choice.function.name!r}, but tools has only "
                f"{', '.join(tool.function.name for tool in tools)}",
                param="tool_choice",
            )
        return named
