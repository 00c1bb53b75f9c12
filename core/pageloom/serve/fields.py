"""What every object that clients send has in common."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


def _with_nulls(schema: dict[str, Any]) -> None:
    fields = schema.get("properties", {})
    for name in fields.keys() - set(schema.get("required", [])):
        if {"type": "null"} not in fields[name].get("anyOf", []):
            fields[name] = {"anyOf": [fields[name], {"type": "null"}]}


class Fields(BaseModel):
    """Fields nobody knows are refused by name, unless the operator has them ignored. Null is as if
    the field were absent."""

    model_config = ConfigDict(
        extra="forbid", protected_namespaces=(), json_schema_extra=_with_nulls
    )

    @field_validator("*", mode="before")
    @classmethod
    def _null_is_absent(cls, value: Any, info: ValidationInfo) -> Any:
        field = cls.model_fields[info.field_name or ""]
        return field.default if value is None and not field.is_required() else value
