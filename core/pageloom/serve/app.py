"""The HTTP application: which path leads where, and how errors are answered."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from itertools import takewhile
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from pageloom.errors import shorten
from pageloom.serve import http_metrics, tokens
from pageloom.serve.body import read_body
from pageloom.serve.chat import Chat
from pageloom.serve.client import EngineDiedError
from pageloom.serve.completions import Completion
from pageloom.serve.description import describe_bodies
from pageloom.serve.errors import (
    APIError,
    engine_died,
    internal_error,
)
from pageloom.serve.gate import error_response
from pageloom.serve.generation import peek, while_connected
from pageloom.serve.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from pageloom.serve.service import Service
from pageloom.serve.sse import EventStream

Body = TypeVar("Body", bound=BaseModel)
_TYPE = re.compile(r"str|int|float|bool|[A-Z]\w*|[\w-]*\[.*\]", re.DOTALL)


def create_app(service: Service) -> FastAPI:
    """Every endpoint of one engine."""
    app = FastAPI(title="Pageloom", version=version("pageloom"), docs_url=None, redoc_url=None)
    _add_error_handlers(app)
    takes = describe_bodies(app)

    @app.post("/v1/completions", openapi_extra=takes(CompletionRequest))
    async def completions(request: Request) -> Response:
        body = await _read(request, CompletionRequest, service)
        return await _answer(request, Completion.prepare(service, body), body.stream)

    @app.post("/v1/chat/completions", openapi_extra=takes(ChatCompletionRequest))
    async def chat_completions(request: Request) -> Response:
        body = await _read(request, ChatCompletionRequest, service)
        return await _answer(request, Chat.prepare(service, body), body.stream)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [service.card()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return service.card()

    @app.post("/tokenize", openapi_extra=takes(TokenizeRequest))
    async def tokenize(request: Request) -> dict[str, Any]:
        body = await _read(request, TokenizeRequest, service)
        return await tokens.tokenize(service, body)

    @app.post("/detokenize", openapi_extra=takes(DetokenizeRequest))
    async def detokenize(request: Request) -> dict[str, Any]:
        body = await _read(request, DetokenizeRequest, service)
        return await tokens.detokenize(service, body)

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        return tokens.tokenizer_info(service)

    @app.get("/health")
    async def health() -> Response:
        if not service.client.is_alive or service.draining:
            raise APIError("the engine is not running", 503, "server_error", code="engine")
        return Response()

    @app.get("/metrics")
    async def metrics() -> Response:
        found = await service.client.inspect()
        return Response(
            found.metrics + found.live_metrics() + http_metrics.exposition(),
            media_type="text/plain; version=0.0.4; charset=utf-8",
        )

    @app.get("/version")
    async def show_version() -> dict[str, str]:
        return {"version": version("pageloom")}

    _add_heads(app)
    return app


def _add_heads(app: FastAPI) -> None:
    """HEAD for whatever has GET, as load balancers ask."""
    for route in list(app.routes):
        if isinstance(route, APIRoute) and route.methods == {"GET"}:
            app.add_api_route(route.path, route.endpoint, methods=["HEAD"], include_in_schema=False)


async def _read(request: Request, model: type[Body], service: Service) -> Body:
    """The body of a request. Raises `APIError` for what is too large or not as ``model`` says."""
    headers = request.headers
    if (coding := headers.get("content-encoding", "identity")) != "identity":
        raise APIError(f"the body is coded as {shorten(coding)!r}; send it as it is", 415)
    declared = int(headers.get("content-length", 0))
    data = await read_body(request.stream(), service.config, declared)
    strict = service.config.unknown_fields == "refuse"
    try:
        return model.model_validate_json(data, extra=None if strict else "ignore")
    except ValidationError as error:
        raise _unfit(error) from error


def _unfit(error: ValidationError) -> APIError:
    """The first fault, by the name of its field, and what else that field may be."""
    first, *others = error.errors(include_url=False, include_context=False, include_input=False)
    where, param = _field(first["loc"]), str(first["loc"][0]) if first["loc"] else None
    if first["type"] == "extra_forbidden":
        return APIError(f"there is no field {where!r} here", param=param, code="unknown_field")
    if first["type"] == "json_invalid":
        reason = first["msg"].removeprefix("Invalid JSON: ")
        return APIError(f"the body is not valid JSON: {reason}")
    alike = [first["msg"], *(other["msg"] for other in others if _field(other["loc"]) == where)]
    message = ", or: ".join(dict.fromkeys(alike))
    return APIError(f"{where}: {message}" if where else message, param=param)


def _field(location: tuple[int | str, ...]) -> str:
    """The name of a field, without what pydantic adds to tell the types apart that it may have."""
    named = takewhile(lambda part: not _TYPE.fullmatch(str(part)), location)
    return ".".join(map(str, named))


async def _answer(
    request: Request, preparing: Awaitable[Completion | Chat], stream: bool
) -> Response:
    call = await while_connected(request, preparing)
    if not stream:
        return JSONResponse(await while_connected(request, call.whole()))
    bodies = await while_connected(request, peek(call.stream()))
    return EventStream(bodies)


def _add_error_handlers(app: FastAPI) -> None:
    async def api_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, APIError)
        return error_response(error)

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = shorten(request.url.path, 200)
        message = f"{path}: {error.detail}"
        if error.status_code == 404:
            message = f"there is no path {path} here; /openapi.json lists those that are"
        elif error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "another method")
            message = f"{path} takes no {request.method}; use {allowed}"
        body = APIError(message, error.status_code).body()
        return JSONResponse(body, error.status_code, headers=error.headers)

    async def engine_gone(_: Request, error: Exception) -> Response:
        return error_response(engine_died())

    async def defect(_: Request, error: Exception) -> Response:
        return error_response(internal_error())  # it is raised again, and logged by the gate

    handlers: dict[type[Exception], Callable[[Request, Exception], Awaitable[Response]]] = {
        APIError: api_error,
        HTTPException: http_error,
        EngineDiedError: engine_gone,
        Exception: defect,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)
