"""Filling a dataclass from plain values, leaf by leaf, so that every wrong leaf is reported.

OmegaConf's structured configs convert and check each value and resolve ``${...}``.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import re
import types
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import (
    GrammarParseError,
    InterpolationResolutionError,
    InterpolationValidationError,
    OmegaConfBaseException,
    UnsupportedInterpolationType,
)

from pageloom.config.errors import ABSENT, Problem, show
from pageloom.config.rules import Rule
from pageloom.errors import nearest, shorten

Place = Callable[[str], str]  # where a key was given

_INTERPOLATIONS = "${env:NAME}, ${env:NAME,DEFAULT}, ${pkg:MODULE/FILE} or ${section.key}"
_NOUNS = {int: "an integer", float: "a number", bool: "true or false", str: "text", Any: "anything"}


def structure(schema: type) -> DictConfig:
    """An empty tree of ``schema``, every field at its default.

    Raises OmegaConf's errors when the schema has a type that no YAML value could have.
    """
    tree: DictConfig = OmegaConf.structured(schema)
    OmegaConf.set_readonly(tree, False)  # a frozen dataclass makes it true
    return tree


def assign(
    tree: DictConfig, values: Mapping[str, Any], place: Place, prefix: str = ""
) -> Iterator[Problem]:
    """Put ``values`` into ``tree``; what does not fit is left out and yielded as a problem."""
    schema = _schema(tree)
    fields = {field.name: field for field in dataclasses.fields(schema) if field.init}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if name not in fields:
            yield _unknown_key(schema, name, key, value, place)
        elif isinstance(value, Mapping) and (kind := _section(schema, name)):
            yield from assign(_open(tree, name, kind), value, place, f"{key}.")
        elif (reason := _set(tree, fields[name], value)) is not None:
            yield Problem(key, place(key), reason, value, expected_of(schema, fields[name]))


def evaluate(
    tree: DictConfig, place: Place, prefix: str = ""
) -> Iterator[tuple[str, Any, Problem | None]]:
    """Every leaf's key with its resolved value, or with each thing that is wrong with it."""
    schema = _schema(tree)
    for field in dataclasses.fields(schema):
        key = f"{prefix}{field.name}"
        if OmegaConf.is_missing(tree, field.name):
            reason = "required, but not given"
            expected = expected_of(schema, field)
            yield key, ABSENT, Problem(key, place(key), reason, expected=expected)
        elif _section(schema, field.name) and tree[field.name] is not None:
            yield from evaluate(tree[field.name], place, f"{key}.")
        else:
            value, problems = _resolve(tree, field, key, place)
            yield from ((key, ABSENT, problem) for problem in problems)
            if not problems:
                yield key, value, None


def expected_of(schema: type, field: dataclasses.Field[Any]) -> str:
    """What a field accepts, in words."""
    hint = typing.get_type_hints(schema)[field.name]
    rule: Rule | None = field.metadata.get("rule")
    if rule is None:
        return _describe(hint)
    return f"{rule.expected}, or null" if type(None) in typing.get_args(hint) else rule.expected


def _unknown_key(schema: type, name: str, key: str, value: Any, place: Place) -> Problem:
    fields = [field.name for field in dataclasses.fields(schema) if field.init]
    section, _, rest = name.partition(".")
    if rest and section in fields:
        expected = f"'{section}:' with '{rest}:' indented below it"
        return Problem(key, place(key), "a dot does not nest in a file", value, expected)
    while place(key).startswith("--set") and isinstance(value, Mapping) and len(value) == 1:
        ((inner, value),) = value.items()
        key = f"{key}.{inner}"
    leaves: dict[str, str] = {}  # those of the sections, by their own name
    for field in fields:
        if kind := _section(schema, field):
            for leaf in dataclasses.fields(kind):
                leaves.setdefault(leaf.name, f"{field}.{leaf.name}")
    guess = leaves.get(name.lower()) or nearest(name, fields) or leaves.get(nearest(name, leaves))
    expected = f"one of {', '.join(fields)}" if fields else "nothing, for there are no options"
    return Problem(key, place(key), "unknown key", value, expected, guess or "")


def _resolve(
    tree: DictConfig, field: dataclasses.Field[Any], key: str, place: Place
) -> tuple[Any, list[Problem]]:
    schema, rule = _schema(tree), field.metadata.get("rule")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # ${env:NAME,} has an empty default
        failures = list(_unresolved(tree, field.name, key))
        if failures:
            return ABSENT, [
                Problem(at, place(at), _reason(error), raw, _instead(error, schema, field))
                for at, raw, error in failures
            ]
        value = tree[field.name]
        if OmegaConf.is_config(value):
            value = OmegaConf.to_container(value, resolve=True)
    hint = typing.get_type_hints(schema)[field.name]
    fits = value is None or rule is None or rule.accepts(value)
    if fits and (Any in typing.get_args(hint) or not _has_nan(value)):
        return value, []
    return ABSENT, [Problem(key, place(key), "", value, expected_of(schema, field))]


def _unresolved(
    parent: Any, name: Any, key: str, above: tuple[Any, ...] = ()
) -> Iterator[tuple[str, Any, OmegaConfBaseException]]:
    """Every value in ``parent[name]`` that cannot be resolved: its key, as it is written, why."""
    try:
        value = parent[name]
        if any(value is node for node in above):
            raise InterpolationResolutionError("Recursive interpolation detected")
    except OmegaConfBaseException as error:
        raw: Any = OmegaConf.to_container(parent, resolve=False)
        yield key, raw[name], error
        return
    if isinstance(value, DictConfig):
        for inner in value:
            yield from _unresolved(value, inner, f"{key}.{inner!s}", (*above, value))
    elif isinstance(value, ListConfig):
        for i in range(len(value)):
            yield from _unresolved(value, i, f"{key}[{i}]", (*above, value))


def _has_nan(value: Any) -> bool:
    if isinstance(value, dict | list):
        return any(map(_has_nan, value.values() if isinstance(value, dict) else value))
    return isinstance(value, float) and math.isnan(value)


def _schema(tree: DictConfig) -> type[Any]:
    """The dataclass that a tree was made from."""
    schema = OmegaConf.get_type(tree)
    if schema is None:
        raise TypeError(f"{tree} has no dataclass")
    return schema


def _section(schema: type, name: str) -> type | None:
    """The dataclass that a field holds, whose own fields are set one by one."""
    members = _members(typing.get_type_hints(schema)[name])
    kinds = [member for member in members if isinstance(member, type)]
    return next((kind for kind in kinds if dataclasses.is_dataclass(kind)), None)


def _open(tree: DictConfig, name: str, kind: type) -> DictConfig:
    """The section of that name, made if there is none yet, and writable."""
    if OmegaConf.is_missing(tree, name) or tree[name] is None:
        OmegaConf.update(tree, name, structure(kind), merge=False)
    section: DictConfig = tree[name]
    OmegaConf.set_readonly(section, False)
    return section


def _set(tree: DictConfig, field: dataclasses.Field[Any], value: Any) -> str | None:
    """Set one leaf. Returns None, or why not ("" if that goes without saying)."""
    schema = _schema(tree)
    hint = typing.get_type_hints(schema)[field.name]
    if _misfits(hint, value) or (value is not None and _section(schema, field.name)):
        return ""
    try:
        OmegaConf.update(tree, field.name, value)
    except GrammarParseError:
        return f"not a valid interpolation, which would be {_INTERPOLATIONS}"
    except OmegaConfBaseException as error:
        kinds = [typing.get_origin(member) or member for member in _members(hint)]
        inside = isinstance(value, list | dict) and type(value) in kinds
        return _reason(error) if inside else ""
    return None


def _misfits(hint: Any, value: Any) -> bool:
    """Whether OmegaConf would take a value that is of no type in ``hint``: it makes the text
    "True" of a bool and true of an integer, and overlooks a list or mapping in a list of texts."""
    members = set(_members(hint))
    if Any in members:
        return False
    if isinstance(value, list | dict) and members <= {*_NOUNS, type(None)}:
        return True
    if isinstance(value, list):
        items = [item for member in members for item in typing.get_args(member)[:1]]
        return any(_misfits(item, element) for item in items for element in value)
    if isinstance(value, bool):
        return bool not in members
    return isinstance(value, int | float) and bool in members and type(value) not in members


def _members(hint: Any) -> tuple[Any, ...]:
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if union else (hint,)


def _describe(hint: Any) -> str:
    members = _members(hint)
    if len(members) > 1:
        return " or ".join(_describe(member) for member in members)
    if hint is type(None):
        return "null"
    if hint in _NOUNS:
        return _NOUNS[hint]
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return f"one of {', '.join(hint.__members__)}"
    kind = typing.get_origin(hint) or hint
    if kind is list:
        items = typing.get_args(hint)
        return f"a list, each item {_describe(items[0])}" if items else "a list"
    if dataclasses.is_dataclass(hint):
        return f"a mapping with some of {', '.join(f.name for f in dataclasses.fields(hint))}"
    if kind is dict:
        return "a mapping"
    return getattr(hint, "__name__", str(hint))


def _reason(error: OmegaConfBaseException) -> str:
    """The first line of OmegaConf's message, without the resolver's type of exception."""
    if isinstance(error, InterpolationValidationError) and (
        match := re.search(r"Value '(.*)' of type '\w+'", str(error), re.DOTALL)
    ):
        return f"it resolves to {show(match[1])}"
    text = str(error).split("\n")[0]
    return shorten(re.sub(r"^\w+ raised while resolving interpolation: ", "", text), 1000)


def _instead(error: OmegaConfBaseException, schema: type, field: dataclasses.Field[Any]) -> str:
    """What would work instead of an interpolation that fails."""
    if isinstance(error, InterpolationValidationError):
        return expected_of(schema, field)
    unsupported = isinstance(error, UnsupportedInterpolationType)
    return _INTERPOLATIONS if unsupported else ""
