"""``/tokenize``, ``/detokenize`` and ``/tokenizer_info``, as vLLM has them."""

from __future__ import annotations

import asyncio
from typing import Any

from pageloom.serve.chat import render
from pageloom.serve.errors import APIError
from pageloom.serve.protocol import ChatTemplateFields, DetokenizeRequest, TokenizeRequest
from pageloom.serve.service import Service


async def tokenize(service: Service, request: TokenizeRequest) -> dict[str, Any]:
    """Raises `APIError`."""
    service.check_model(request.model)
    token_ids = await _token_ids(service, request)
    answer: dict[str, Any] = {
        "count": len(token_ids),
        "max_model_len": service.client.info.max_model_len,
        "tokens": token_ids,
    }
    if request.return_token_strs and service.prompts.tokenizer is not None:
        answer["token_strs"] = service.prompts.tokenizer.convert_ids_to_tokens(token_ids)
    return answer


async def _token_ids(service: Service, request: TokenizeRequest) -> list[int]:
    if (request.prompt is None) == (request.messages is None):
        raise APIError("send either prompt or messages", param="prompt")
    if request.messages is not None:
        if request.add_special_tokens:
            raise APIError(
                "the chat template writes the special tokens of a conversation; leave out "
                "add_special_tokens",
                param="add_special_tokens",
            )
        return await render(service, request.messages, request, request.tools or [])
    for name in (*ChatTemplateFields.model_fields, "tools"):
        if getattr(request, name):
            raise APIError(f"{name} is for messages, and there is a prompt", param=name)
    add_special_tokens = request.add_special_tokens is not False
    (token_ids,) = await service.encode(
        [request.prompt or ""], add_special_tokens=add_special_tokens
    )
    return token_ids


async def detokenize(service: Service, request: DetokenizeRequest) -> dict[str, Any]:
    """Raises `APIError`."""
    service.check_model(request.model)
    most = service.client.info.max_model_len
    if len(request.tokens) > most:
        raise APIError(
            f"tokens has {len(request.tokens)} ids, but max_model_len is {most}", param="tokens"
        )
    (token_ids,) = await service.encode([request.tokens], param="tokens")
    try:
        return {"prompt": await asyncio.to_thread(service.prompts.decode, token_ids)}
    except ValueError as error:
        raise APIError(str(error), param="tokens") from error


def tokenizer_info(service: Service) -> dict[str, Any]:
    """What ``tokenizer_config.json`` says, as far as clients can use it. Raises `APIError`."""
    tokenizer = service.prompts.tokenizer
    if tokenizer is None:
        raise APIError("this model has no tokenizer", 404, code="no_tokenizer")
    return {
        "tokenizer_class": type(tokenizer).__name__,
        "vocab_size": len(tokenizer),
        "model_max_length": service.client.info.max_model_len,
        **{
            name: getattr(tokenizer, name)
            for name in ("bos_token", "eos_token", "pad_token", "unk_token")
        },
        "chat_template": tokenizer.chat_template,
        "added_tokens_decoder": {
            str(token_id): {"content": token.content, "special": token.special}
            for token_id, token in tokenizer.added_tokens_decoder.items()
        },
    }
