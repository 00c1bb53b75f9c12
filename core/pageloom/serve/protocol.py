"""What clients send: the OpenAI API's fields, and those that vLLM added to them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
)
from pydantic_core import PydanticCustomError

from pageloom.scheduling.params import MAX_LOGPROBS, MAX_N
from pageloom.serve.fields import Fields
from pageloom.serve.structured import StructuredFields
from pageloom.serve.tools import ToolFields, Tools

MAX_PROMPTS = 256  # in one request
MAX_MESSAGES = 4096
MAX_NAME = 1024  # characters of a tenant or a salt


def described(expected: str) -> WrapValidator:
    """One sentence about a field of several types, where each type would have one of its own."""

    def validate(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError as error:
            raise PydanticCustomError("described", "must be {what}", {"what": expected}) from error

    return WrapValidator(validate)


def _not_truth(value: Any) -> Any:
    if isinstance(value, bool):  # such as a chat's ``logprobs`` in a completion
        raise PydanticCustomError("integer", "must be an integer, not true or false")
    return value


Integer = Annotated[int, BeforeValidator(_not_truth)]
Count = Annotated[Integer, Field(ge=0, lt=2**31)]
Some = Annotated[Integer, Field(ge=1, lt=2**31)]
Outputs = Annotated[Integer, Field(ge=1, le=MAX_N)]
Likeliest = Annotated[Integer, Field(ge=0, le=MAX_LOGPROBS)]
Name = Annotated[str, Field(max_length=MAX_NAME)]
TokenId = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
TokenIds = list[TokenId]
Prompts = Annotated[
    str | TokenIds | list[str] | list[TokenIds],
    described("a text, a list of token ids, a list of texts, or a list of lists of token ids"),
]
Stop = Annotated[str | list[str] | None, described("a string or a list of strings")]
EarlyStopping = Annotated[bool | Literal["never"] | None, described('true, false or "never"')]


def _message(message: dict[str, Any]) -> dict[str, Any]:
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise PydanticCustomError("message", 'must have a role, such as "user"')
    if content is None and role != "assistant":
        raise PydanticCustomError("message", "must have a content")
    parts = content if isinstance(content, list) else []
    if not isinstance(content, str | list | None) or not all(isinstance(p, dict) for p in parts):
        raise PydanticCustomError("message", "must have a content that is text or a list of parts")
    return message


# A dict, since chat templates may read fields of a message that nobody here knows.
Message = Annotated[
    dict[str, Any],
    AfterValidator(_message),
    WithJsonSchema(
        {
            "type": "object",
            "required": ["role"],
            "properties": {
                "role": {"type": "string"},
                "content": {
                    "anyOf": [
                        {"type": "string"},
                        {"type": "array", "items": {"type": "object"}},
                        {"type": "null"},
                    ]
                },
            },
        }
    ),
]
Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]


class StreamOptions(Fields):
    include_usage: bool = False
    """Whether a last chunk, without choices, has the tokens of the whole request."""
    continuous_usage_stats: bool = False
    """Whether every chunk has the tokens so far."""
    include_obfuscation: Literal[False] = False
    """No padding hides the lengths of chunks here."""


class GenerationFields(StructuredFields):
    """What completions and chat completions have in common.

    Where a field has a namesake in `pageloom.SamplingParams`, it means the same.
    """

    model: str | None = None
    """One of ``/v1/models``; may be left out."""
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Outputs = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[Integer, Field(ge=-1, lt=2**31)] | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: Integer | None = None
    stop: Stop = None
    stop_token_ids: TokenIds | None = None
    min_tokens: Count = 0
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    use_beam_search: bool = False
    """Search with ``n`` beams, or ``best_of`` where that is more, instead of sampling."""
    length_penalty: float | None = None
    """Of a beam search, as is ``early_stopping``."""
    early_stopping: EarlyStopping = None
    best_of: Outputs | None = None
    """How many outputs are tried; the ``n`` likeliest of them are returned."""
    priority: Annotated[Integer, Field(ge=-(2**31), lt=2**31)] = 0
    """Lower runs earlier, where the scheduling policy goes by it."""
    user: Name | None = None
    """The tenant, for fair scheduling."""
    cache_salt: Name | None = None
    """Only requests with the same salt share cached prefixes."""


class CompletionRequest(GenerationFields):
    """``POST /v1/completions``"""

    prompt: Prompts
    max_tokens: Count = 16
    """Of output, per choice; 0 with ``echo`` scores the prompt."""
    echo: bool = False
    """Whether the text begins with the prompt."""
    logprobs: Likeliest | None = None
    """How many of the likeliest tokens to return beside each token."""
    add_special_tokens: bool = True
    """Whether a text gets the special tokens that the tokenizer puts around one."""
    suffix: Literal[""] | None = None
    """Not supported; accepted if it asks for nothing."""

    def prompts(self) -> list[str | list[int]]:
        """The prompts in order: one, or as many as were sent."""
        prompt: Any = self.prompt
        if isinstance(prompt, str) or not prompt or isinstance(prompt[0], int):
            return [prompt]
        return list(prompt)


class ChatTemplateFields(Fields):
    """How the chat template renders a conversation."""

    add_generation_prompt: bool | None = None
    """Whether the prompt ends with what begins an answer; null: unless the last is continued."""
    continue_final_message: bool = False
    """Whether the last message is left open, and the answer goes on with it."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the template, such as ``{"enable_thinking": false}``."""


class ChatCompletionRequest(GenerationFields, ChatTemplateFields, ToolFields):
    """``POST /v1/chat/completions``"""

    messages: Messages
    max_tokens: Some | None = None
    max_completion_tokens: Some | None = None
    """The newer name of ``max_tokens``, which it comes before."""
    logprobs: bool = False
    top_logprobs: Likeliest | None = None

    # What follows asks for nothing, or is refused.
    store: Literal[False] = False
    metadata: dict[str, str] | None = None
    """Labels of answers that are stored, and none is."""
    service_tier: Literal["auto", "default"] | None = None
    modalities: list[Literal["text"]] | None = None
    verbosity: Literal["medium"] | None = None
    prompt_cache_key: str | None = None
    """A hint at which machine has a prefix. There is one, and it finds every prefix it has."""
    prompt_cache_retention: Literal["in_memory"] | None = None
    safety_identifier: str | None = None
    """Tells the end user to whoever polices a service; nobody does here."""


class TokenizeRequest(ChatTemplateFields):
    """``POST /tokenize``: of a prompt, or of a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    """What a chat would tell the model of."""
    add_special_tokens: bool | None = None
    """Whether a prompt gets special tokens around it, as it does if null; a conversation has those
    that the template writes."""
    return_token_strs: bool = False


class DetokenizeRequest(Fields):
    """``POST /detokenize``"""

    model: str | None = None
    tokens: TokenIds
