"""Which plugins are installed, which of them may be loaded, and whether they fit this engine."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

from pageloom.contract import CONTRACT_VERSION
from pageloom.errors import PageloomError, suggest

GROUP = "pageloom"
VARIABLE = "PAGELOOM_PLUGINS"


class PluginError(PageloomError):
    """A plugin, or something asked of one, is wrong. The message names the plugin."""


class UnknownPluginError(PluginError):
    """A name in an allow or deny list matches nothing installed; ``key`` says in which list."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(f"{key}: {reason}")
        self.key = key
        self.reason = reason


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


def choose(
    plugins: Collection[PluginInfo], allow: Sequence[str] | None, deny: Sequence[str]
) -> set[PluginInfo]:
    """The plugins that ``allow``, ``deny`` and ``PAGELOOM_PLUGINS`` leave.

    Raises `UnknownPluginError` for a name in any of them that no plugin answers to.
    """

    def matching(key: str, names: Sequence[str]) -> set[PluginInfo]:
        matches = {name: {info for info in plugins if info.answers_to(name)} for name in names}
        valid = {info.name for info in plugins} | {info.package for info in plugins}
        if unknown := [name for name in names if not matches[name]]:
            told = "; ".join(
                f"{name!r} is not installed, {suggest(name, valid)}" for name in unknown
            )
            raise UnknownPluginError(key, told)
        return set().union(*matches.values())

    chosen = set(plugins) if allow is None else matching("plugins.allow", allow)
    chosen -= matching("plugins.deny", deny)
    limit = os.environ.get(VARIABLE)
    if limit is not None:
        chosen &= matching(VARIABLE, [name.strip() for name in limit.split(",") if name.strip()])
    return chosen


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
