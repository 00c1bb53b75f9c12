"""Plugins: finding them, checking them, and looking up what they registered.

A plugin is an entry point of the group ``pageloom`` (see `pageloom.contract`). Built-in plugins
come in by the same door. Nothing here imports a registered target before it is asked for.

Environment: ``PAGELOOM_PLUGINS`` limits loading to a comma-separated list of entry-point or
distribution names (set but empty: none); ``PAGELOOM_TRACE=1`` writes every hook call to stderr.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from types import FrameType
from typing import Any, NamedTuple

import pluggy

from pageloom.contract import (
    CONTRACT_VERSION,
    AttentionBackend,
    Executor,
    KVQuantizer,
    Scheduler,
    ToolParser,
    WeightLoader,
    hooks,
)
from pageloom.discovery import (
    PluginError,
    PluginInfo,
    PluginRefusedError,
    UnknownPluginError,
    check_version,
    exclude,
    installed,
)
from pageloom.errors import PageloomError, one_line, suggest

__all__ = [
    "KINDS",
    "OBSERVERS",
    "ComponentEntry",
    "PluginError",
    "PluginFailure",
    "Plugins",
    "UnknownPluginError",
    "blame",
    "label",
    "pass_on_signals",
]

log = logging.getLogger(__name__)

KINDS: Mapping[str, type] = {
    "scheduler": Scheduler,
    "attention_backend": AttentionBackend,
    "kv_quantizer": KVQuantizer,
    "weight_loader": WeightLoader,
    "tool_parser": ToolParser,
    "executor": Executor,
}
OBSERVERS = ("engine_started", "step_finished", "request_finished")

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@dataclass(frozen=True)
class ComponentEntry:
    """One registered component. ``target`` is ``"module:Class"``, imported only by `get`;
    ``plugin`` is the entry point that registered it."""

    kind: str
    name: str
    target: str
    plugin: str
    package: str
    version: str


@dataclass(frozen=True)
class PluginFailure:
    """A plugin that was allowed but is not loaded, and why."""

    plugin: PluginInfo
    reason: str  # one line
    traceback: str  # empty when the plugin was refused rather than failed
    fatal: bool = False  # it breaks the contract or claims a name that is taken

    def __str__(self) -> str:
        return f"{self.plugin} failed to load: {self.reason}"


class _Observer(NamedTuple):
    name: str
    plugin: object
    call: Callable[..., Any]


class Plugins:
    """The loaded plugins of one engine. `Plugins()` has none; `Plugins.load` finds them."""

    def __init__(self) -> None:
        self.failures: list[PluginFailure] = []
        self.observers: list[PluginInfo] = []
        self.skipped: dict[PluginInfo, str] = {}  # by which list it is excluded
        self._entries: dict[tuple[str, str], ComponentEntry] = {}
        self._observers: dict[str, list[_Observer]] = {hook: [] for hook in OBSERVERS}
        self._manager = pluggy.PluginManager("pageloom")
        self._manager.add_hookspecs(hooks)
        if os.environ.get("PAGELOOM_TRACE", "0") not in ("", "0"):
            self._manager.trace.root.setwriter(sys.stderr.write)
            self._manager.enable_tracing()

    @classmethod
    def load(cls, allow: Sequence[str] | None = None, deny: Sequence[str] = ()) -> Plugins:
        """Load the installed plugins, limited to ``allow`` (None: all) and without ``deny``.

        Both lists, and ``PAGELOOM_PLUGINS``, hold entry-point or distribution names.

        A plugin that cannot be imported, raises in a registering hook, or was written for another
        contract is logged, kept in `failures`, and contributes nothing. So is, but as ``fatal``,
        one whose hook implementation matches no hook or that claims a name which is taken: no
        engine starts with it. Raises `UnknownPluginError` for a listed name that matches nothing
        installed.
        """
        plugins = cls()
        found = installed()
        excluded = exclude(found, allow, deny)
        for info in sorted(found, key=lambda info: (info.package, info.name)):
            if info in excluded:
                plugins.skipped[info] = excluded[info]
            else:
                plugins._load(info, found[info])
        plugins._refresh_observers()
        return plugins

    @property
    def components(self) -> list[ComponentEntry]:
        """Everything registered, sorted by kind and name."""
        return [self._entries[key] for key in sorted(self._entries)]

    @property
    def hook(self) -> Any:
        """pluggy's hook relay, to see who implements what. Observers are called by `notify`."""
        return self._manager.hook

    def names(self, kind: str) -> list[str]:
        """The names registered for one of `KINDS`, sorted."""
        return sorted(name for of, name in self._entries if of == kind)

    def get(self, kind: str, name: str) -> type[Any]:
        """Import the class registered under ``name``.

        Raises `PluginError` when there is none, when it cannot be imported, or when it is not a
        complete class of this kind.
        """
        entry = self._entries.get((kind, name))
        if entry is None:
            raise PluginError(self._unknown(kind, name))
        owner = f"{label(kind)} {name!r} ({entry.target} of {entry.package} {entry.version})"
        module_name, _, class_name = entry.target.partition(":")
        try:
            module = importlib.import_module(module_name)
            target = getattr(module, class_name, None)
        except (Exception, SystemExit) as error:
            pass_on_signals(error)
            reason = f"cannot be imported: {one_line(error)}"
            raise PluginError(f"{owner} {reason}", reason) from error
        base = KINDS[kind]
        if target is None:
            reason = f"module {module_name} has no {class_name}"
            raise PluginError(f"{owner}: {reason}", reason)
        if not (isinstance(target, type) and issubclass(target, base)):
            reason = f"is not a subclass of pageloom.contract.{base.__name__}"
            raise PluginError(f"{owner} {reason}", reason)
        if missing := getattr(target, "__abstractmethods__", None):
            reason = f"does not implement {', '.join(sorted(missing))}"
            raise PluginError(f"{owner} {reason}", reason)
        return target

    def unloaded(self) -> str:
        """One sentence on the plugins that are installed but not loaded, or ``""``."""
        parts = [str(failure) for failure in self.failures]
        for key in sorted(set(self.skipped.values())):
            names = [
                f"{info.name} ({info.package})" for info, by in self.skipped.items() if by == key
            ]
            parts.append(f"excluded by {key}: {', '.join(names)}")
        return "; ".join(parts)

    def register_observer(self, observer: object) -> None:
        """Call the observer hooks that ``observer`` implements (``@hookimpl`` methods) from now on.

        Raises `PluginError` when it implements none, or anything else.
        """
        name = f"{type(observer).__name__}@{id(observer):x}"
        if type(observer).__hash__ is None:
            raise PluginError(f"observer {name} must be hashable (a dataclass needs eq=False)")
        try:
            self._register(observer, name)
        except PluginError as error:
            raise PluginError(f"observer {name}: {error}") from error
        implemented = [caller.name for caller in self._manager.get_hookcallers(observer) or ()]
        if not implemented or not set(implemented) <= set(OBSERVERS):
            self._manager.unregister(observer)
            raise PluginError(
                f"observer {name} must implement some of {', '.join(OBSERVERS)} and nothing else; "
                f"it implements {', '.join(implemented) or 'none'}"
            )
        self._refresh_observers()

    def observes(self, hook: str) -> bool:
        """Whether anyone implements ``hook``, so that nobody gathers what none will read."""
        return bool(self._observers[hook])

    def notify(self, hook: str, **values: Any) -> None:
        """Call every observer of ``hook``, one of `OBSERVERS`.

        An observer that raises is logged by name and no hook of it is called again.
        """
        for observer in self._observers[hook]:
            try:
                observer.call(**values)
            except (Exception, SystemExit) as error:
                pass_on_signals(error)
                log.error(
                    "plugin %s raised in %s and is not called again: %s",
                    observer.name,
                    hook,
                    one_line(error),
                )
                log.debug("%s", traceback.format_exc())
                self._manager.unregister(observer.plugin)
                self._refresh_observers()

    def _load(self, info: PluginInfo, point: EntryPoint) -> None:
        try:
            module = point.load()
            check_version(module)
        except PluginRefusedError as error:
            return self._fail(info, str(error), "")
        except (Exception, SystemExit) as error:
            pass_on_signals(error)
            return self._fail(info, one_line(error), traceback.format_exc())
        try:
            self._register(module, f"{info.package}:{info.name}")
        except PluginError as error:
            return self._fail(info, str(error), "", fatal=True)
        try:
            self._entries |= self._collect(info, module)
        except PluginError as error:
            self._manager.unregister(module)
            self._fail(info, str(error), "", fatal=True)
        except (Exception, SystemExit) as error:
            pass_on_signals(error)
            self._manager.unregister(module)
            self._fail(info, one_line(error), traceback.format_exc())
        else:
            callers = self._manager.get_hookcallers(module) or ()
            if any(caller.name in OBSERVERS for caller in callers):
                self.observers.append(info)

    def _fail(self, info: PluginInfo, reason: str, trace: str, fatal: bool = False) -> None:
        self.failures.append(PluginFailure(info, reason, trace, fatal))
        log.warning("%s", self.failures[-1])
        if trace:
            log.debug("%s", trace)

    def _register(self, plugin: object, name: str) -> None:
        """Register with pluggy; every hook implementation must match a hook."""
        if taken := self._manager.get_name(plugin):
            raise PluginError(f"it is already registered as {taken}")
        try:
            self._manager.register(plugin, name)
        except pluggy.PluginValidationError as error:
            detail = " ".join(str(error).split("\n")[1:])
            raise PluginError(f"it does not fit the contract: {detail}") from error
        for caller in self._manager.get_hookcallers(plugin) or ():
            impls = [impl for impl in caller.get_hookimpls() if impl.plugin is plugin]
            if caller.has_spec() or all(impl.optionalhook for impl in impls):
                continue
            known = [name for name in dir(hooks) if hasattr(getattr(hooks, name), "pageloom_spec")]
            self._manager.unregister(plugin)
            raise PluginError(
                f"function {impls[0].function.__name__} implements no hook of contract "
                f"{CONTRACT_VERSION}; {suggest(caller.name, known)}"
            )

    def _collect(self, info: PluginInfo, module: object) -> dict[tuple[str, str], ComponentEntry]:
        """Run the registering hooks of one plugin."""
        collected: dict[tuple[str, str], ComponentEntry] = {}
        others = [plugin for plugin in self._manager.get_plugins() if plugin is not module]
        for kind in KINDS:

            def register(name: str, target: str, kind: str = kind) -> None:
                if not (isinstance(name, str) and isinstance(target, str)):
                    raise TypeError(
                        f"register({name!r}, {target!r}): the name and the target are texts, the "
                        "target of the form 'package.module:Class'"
                    )
                if not _NAME.fullmatch(name) or name == "auto":
                    raise ValueError(f"{name!r} cannot be the name of a {label(kind)}")
                if not _TARGET.fullmatch(target):
                    raise ValueError(f"target {target!r} is not of the form 'package.module:Class'")
                if taken := (self._entries | collected).get((kind, name)):
                    raise PluginError(
                        f"{label(kind)} {name!r} is registered by both {taken.package} "
                        f"{taken.version} ({taken.target}) and {info.package} {info.version} "
                        f"({target}); exclude one of them with plugins.deny"
                    )
                collected[kind, name] = ComponentEntry(
                    kind, name, target, info.name, info.package, info.version
                )

            self._manager.subset_hook_caller(f"register_{kind}s", others)(register=register)
        return collected

    def _refresh_observers(self) -> None:
        """One caller per observing plugin, so that one that raises does not stop the others."""
        plugins = self._manager.get_plugins()
        for hook in OBSERVERS:
            impls = getattr(self._manager.hook, hook).get_hookimpls()
            self._observers[hook] = [
                _Observer(
                    impl.plugin_name,
                    impl.plugin,
                    self._manager.subset_hook_caller(hook, plugins - {impl.plugin}),
                )
                for impl in reversed(impls)
            ]

    def _unknown(self, kind: str, name: str) -> str:
        names = self.names(kind)
        text = f"there is no {label(kind)} {name!r}; {suggest(name, names)}"
        return f"{text}; {self.unloaded()}" if self.unloaded() else text


@contextmanager
def blame(kind: str, name: str) -> Iterator[None]:
    """Name the component in whatever its code raises, as a `PluginError`."""
    try:
        yield
    except PageloomError:
        raise
    except (Exception, SystemExit) as error:
        pass_on_signals(error)
        raise PluginError(f"{label(kind)} {name!r} failed: {one_line(error)}") from error


def pass_on_signals(error: BaseException) -> None:
    """Raise again a `SystemExit` that a signal handler raised, in the middle of a plugin's code:
    handlers are called with the frame that they interrupt."""
    for frame, _ in traceback.walk_tb(error.__traceback__ if type(error) is SystemExit else None):
        for value in frame.f_locals.values():
            given = value if isinstance(value, tuple) else (value,)  # as of `lambda *_: ...`
            if any(isinstance(each, FrameType) and each is frame.f_back for each in given):
                raise error


def label(kind: str) -> str:
    """One of `KINDS` as it stands in a sentence."""
    return kind.replace("_", " ").replace("kv", "KV")
