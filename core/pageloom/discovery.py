"""Which plugins are installed, which of them may be loaded, and whether they fit this engine."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

from pageloom.contract import CONTRACT_VERSION
from pageloom.errors import PageloomError, shorten, suggest

GROUP = "pageloom"
VARIABLE = "PAGELOOM_PLUGINS"


class PluginError(PageloomError):
    """A plugin, or something asked of one, is wrong. The message names the plugin; ``reason`` is
    the part of it that is left when the reader knows which is meant."""

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason or message


class UnknownPluginError(PluginError):
    """Names in allow or deny lists match nothing installed; ``reasons`` are by list."""

    def __init__(self, reasons: Mapping[str, str]) -> None:
        super().__init__("; ".join(f"{key}: {reason}" for key, reason in reasons.items()))
        self.reasons = reasons


class PluginRefusedError(PluginError):
    """The plugin was written for a contract that this engine does not offer."""


@dataclass(frozen=True)
class PluginInfo:
    """One installed entry point: its name, and the distribution that it comes from."""

    name: str
    package: str
    version: str

    def __str__(self) -> str:
        return f"plugin {self.name!r} ({self.package} {self.version})"

    def answers_to(self, name: str) -> bool:
        """Whether ``name``, out of an allow or deny list, means this plugin."""
        return name == self.name or _normal(name) == _normal(self.package)


def installed() -> dict[PluginInfo, EntryPoint]:
    """Every entry point of the group ``pageloom``, imported or not."""
    found = {}
    for point in entry_points(group=GROUP):
        package, version = (point.dist.name, point.dist.version) if point.dist else ("?", "?")
        found[PluginInfo(point.name, package, version)] = point
    return found


def exclude(
    plugins: Collection[PluginInfo], allow: Sequence[str] | None, deny: Sequence[str]
) -> dict[PluginInfo, str]:
    """The plugins that are not to be loaded, each with the first list that excludes it.

    The lists are ``allow``, ``deny`` and the variable ``PAGELOOM_PLUGINS``. Raises
    `UnknownPluginError` for the names in any of them that no plugin answers to.
    """
    limit = os.environ.get(VARIABLE)
    variable = None if limit is None else [name.strip() for name in limit.split(",")]
    named = {"plugins.allow": allow, "plugins.deny": deny, VARIABLE: variable}
    valid = {info.name for info in plugins} | {info.package for info in plugins}
    excluded: dict[PluginInfo, str] = {}
    unknown: dict[str, str] = {}
    for key, names in named.items():
        if names is None:
            continue
        matches = {name: {info for info in plugins if info.answers_to(name)} for name in names}
        if told := [
            f"{shorten(name)!r} is not installed, {suggest(name, valid)}"
            for name in matches
            if not matches[name] and (name or key != VARIABLE)
        ]:
            unknown[key] = "; ".join(told)
        listed: set[PluginInfo] = set().union(*matches.values())
        for info in listed if key == "plugins.deny" else set(plugins) - listed:
            excluded.setdefault(info, key)
    if unknown:
        raise UnknownPluginError(unknown)
    return excluded


def check_version(plugin: object) -> None:
    """Raises `PluginRefusedError` unless ``plugin.contract_version`` fits `CONTRACT_VERSION`."""
    stated = getattr(plugin, "contract_version", None)
    if stated is None:
        raise PluginRefusedError(
            "it does not state the contract it was written for; its module needs "
            f'contract_version = "{CONTRACT_VERSION}"'
        )
    match = re.fullmatch(r"(\d+)\.(\d+)", stated) if isinstance(stated, str) else None
    if match is None:
        raise PluginRefusedError(
            f"its contract_version is {stated!r}, which is not of the form {CONTRACT_VERSION!r}"
        )
    major, minor = (int(part) for part in CONTRACT_VERSION.split("."))
    written_for = f"it was written for contract {stated} and this engine has {CONTRACT_VERSION}"
    if int(match[1]) != major:
        raise PluginRefusedError(
            f"{written_for}, another major version; install a release of it for {major}.x"
        )
    if int(match[2]) > minor:
        raise PluginRefusedError(f"{written_for}; upgrade pageloom")


def _normal(package: str) -> str:
    """The normal form of a distribution's name (PEP 503)."""
    return re.sub(r"[-_.]+", "-", package).lower()
