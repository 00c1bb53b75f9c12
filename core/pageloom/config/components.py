"""Checks the components that a configuration names, and their options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from pageloom.config.errors import ABSENT, ConfigError, Problem
from pageloom.config.options import build_options, option_names
from pageloom.config.schema import PICKERS, Picker
from pageloom.config.typed import Place
from pageloom.errors import nearest
from pageloom.plugins import PluginError, Plugins, label


def check_components(
    values: Mapping[str, Any], plugins: Plugins, place: Place, complete: bool = True
) -> Iterator[Problem]:
    """Problems with the named components. ``values`` are the resolved leaves by full key; those
    that are wrong in themselves are left out, and what depends on them is not checked. Unless
    ``complete``, more plugins were meant to be loaded, and may register a name that is unknown."""
    yield from _check_allowed(values, plugins, place)
    for picker in PICKERS:
        name, options = (
            values.get(f"{picker.section}.{f}", ABSENT) for f in (picker.field, "options")
        )
        if name is ABSENT:
            continue
        if name == picker.unpicked:
            yield from _check_unpicked(picker, options, place)
        elif name in plugins.names(picker.kind):
            yield from _check_options(picker, name, options, plugins, place)
        elif complete:
            yield _unknown(picker, name, plugins, place)


def _check_allowed(values: Mapping[str, Any], plugins: Plugins, place: Place) -> Iterator[Problem]:
    """A plugin that breaks the contract stops start-up; so does one that fails though the
    configuration allows it by name, and so needs it."""
    for failure in plugins.failures:
        if failure.fatal:
            expected = f"it to be excluded with plugins.deny: [{failure.plugin.name}]"
            yield Problem("plugins", place("plugins"), str(failure), expected=expected)
            continue
        for name in values.get("plugins.allow") or ():
            if failure.plugin.answers_to(name):
                yield Problem("plugins.allow", place("plugins.allow"), str(failure), name)


def _check_unpicked(picker: Picker, options: Any, place: Place) -> Iterator[Problem]:
    if options is not ABSENT and options:
        key = f"{picker.section}.options"
        expected = f"{picker.key} to name the component that they belong to"
        yield Problem(key, place(key), "options of no component", options, expected)


def _check_options(
    picker: Picker, name: str, options: Mapping[str, Any], plugins: Plugins, place: Place
) -> Iterator[Problem]:
    try:
        component = plugins.get(picker.kind, name)
    except PluginError as error:
        yield Problem(picker.key, place(picker.key), str(error), name)
        return
    if options is ABSENT:
        return
    try:
        build_options(component, options)
    except ConfigError as error:
        own = option_names(component)
        for problem in error.problems:
            key = ".".join(filter(None, (picker.section, "options", problem.key)))
            owners = [] if problem.key in own else _owners(picker, problem.key, plugins)
            if owners:
                reason = f"an option of {', '.join(owners)}, but {picker.key} is {name}"
                problem = replace(problem, reason=reason, nearest="")
            yield replace(problem, key=key, where=place(key))


def _owners(picker: Picker, option: str, plugins: Plugins) -> list[str]:
    """The other components of the kind that take ``option``."""
    owners = []
    for name in plugins.names(picker.kind):
        try:
            if option in option_names(plugins.get(picker.kind, name)):
                owners.append(name)
        except PluginError:
            continue  # it cannot be imported here, so it cannot help
    return owners


def _unknown(picker: Picker, name: str, plugins: Plugins, place: Place) -> Problem:
    names = plugins.names(picker.kind)
    known = [picker.unpicked, *names] if picker.unpicked else names
    null = "null" if picker.optional else ""
    expected = f"one of {', '.join(known)}" if known else null
    reason = "no plugin registers this name" if names else f"no {label(picker.kind)} is loaded"
    reason = "; ".join(filter(None, (reason, plugins.unloaded())))
    return Problem(picker.key, place(picker.key), reason, name, expected, nearest(name, known))
