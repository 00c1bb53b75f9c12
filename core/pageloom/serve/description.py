"""What ``/openapi.json`` says of the bodies that clients send."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

REFERENCE = "#/components/schemas/{model}"


def describe_bodies(app: FastAPI) -> Callable[[type[BaseModel]], dict[str, Any]]:
    """A function that gives ``openapi_extra`` of a path whose body is as the model says.

    FastAPI would write this by itself for bodies that it reads, but it reads them unbounded.
    """
    models: list[tuple[type[BaseModel], JsonSchemaMode]] = []
    plain = app.openapi

    def takes(model: type[BaseModel]) -> dict[str, Any]:
        models.append((model, "validation"))
        schema = {"$ref": REFERENCE.format(model=model.__name__)}
        return {
            "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}
        }

    def openapi() -> dict[str, Any]:
        described = plain()
        _, found = models_json_schema(models, ref_template=REFERENCE)
        described.setdefault("components", {}).setdefault("schemas", {}).update(found["$defs"])
        return described

    app.openapi = openapi  # type: ignore[method-assign]
    return takes
