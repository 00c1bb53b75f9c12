"""From YAML files and ``--set`` to a checked `Config`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from pageloom.config.components import check_components
from pageloom.config.compose import Composer, Layer
from pageloom.config.errors import ABSENT, ConfigError, Problem
from pageloom.config.resolvers import register_resolvers
from pageloom.config.schema import PICKERS, Config
from pageloom.config.typed import Place, assign, evaluate, structure
from pageloom.contract.sizes import bytes_in
from pageloom.discovery import VARIABLE, installed
from pageloom.plugins import Plugins, UnknownPluginError


def load_config(
    path: str | os.PathLike[str], overrides: Sequence[str] = (), plugins: Plugins | None = None
) -> Config:
    """Compose, resolve and check the configuration in ``path``.

    ``extends: FILE`` or ``extends: [FILE, ...]`` in a file puts it on top of others, relative to
    itself. ``overrides`` are ``"section.key=VALUE"`` texts and win over files. Mappings merge and
    lists replace each other, except that a layer which names another component than the layers
    below it drops their options, which belonged to the former component.

    ``plugins`` are those whose components may be named; None loads the installed ones, within
    ``plugins.allow`` and ``plugins.deny``. The chosen components are imported, since their options
    are checked against their ``Config``. Raises `ConfigError` with everything that is wrong.
    """
    composer = Composer()
    composer.add_file(Path(path))
    composer.add_overrides(overrides)
    draft = _Draft(os.fspath(path), composer.problems)
    for layer in composer.layers:
        draft.apply(layer)
    draft.evaluate(complete=not composer.broken)
    problems = draft.problems
    problems += _check_together(draft.values, draft.place)
    loaded, found = _check_plugins(draft.values, draft.place, plugins)
    problems += found
    if problems or loaded is None:
        raise ConfigError(problems)
    config: Any = OmegaConf.to_object(draft.tree)
    config.origins, config.loaded_plugins = draft.origins, loaded
    return config  # type: ignore[no-any-return]


class _Draft:
    """A configuration being put together. ``values`` has the leaves that are right, by full key."""

    def __init__(self, file: str, problems: Sequence[Problem]) -> None:
        register_resolvers()
        self.tree = structure(Config)
        self.origins: dict[str, str] = {}
        self.values: dict[str, Any] = {}
        self.problems = list(problems)
        self._file = file

    def place(self, key: str) -> str:
        """Where a key was given, or else the nearest key above it."""
        while key and key not in self.origins:
            key = key.rpartition(".")[0]
        return self.origins.get(key, self._file)

    def apply(self, layer: Layer) -> None:
        for picker in PICKERS:
            if not picker.has_options:
                continue
            values = layer.values.get(picker.section)
            section: Any = OmegaConf.to_container(self.tree[picker.section], resolve=False)
            if isinstance(values, dict) and values.get(picker.field, ABSENT) not in (
                ABSENT,
                section[picker.field],
            ):
                self._drop_options(picker.section)
        self.origins |= layer.origins
        self.problems += assign(self.tree, layer.values, self.place)

    def evaluate(self, complete: bool) -> None:
        """Resolve and check the leaves. Unless all files could be read, a value that is not given
        is unknown rather than its default."""
        wrong = {problem.key for problem in self.problems}
        for key, value, problem in evaluate(self.tree, self.place):
            known = complete or key in self.origins or key.startswith("plugins.")
            if key in wrong or not known:
                continue
            if problem is None:
                self.values[key] = value
            else:
                self.problems.append(problem)

    def _drop_options(self, section: str) -> None:
        OmegaConf.update(self.tree, f"{section}.options", {}, merge=False)
        dropped = f"{section}.options"
        for key in [k for k in self.origins if k == dropped or k.startswith(f"{dropped}.")]:
            del self.origins[key]


def _check_together(values: Mapping[str, Any], place: Place) -> Iterator[Problem]:
    """Values that are right alone but not with each other."""
    budget, longest = values.get("scheduler.max_num_batched_tokens"), "model.max_model_len"
    whole = values.get("scheduler.enable_chunked_prefill") is False
    if whole and budget and values.get(longest) and budget < values[longest]:
        key = "scheduler.max_num_batched_tokens"
        reason = "without enable_chunked_prefill a whole prompt must fit in one step"
        expected = f"at least {longest}, which is {values[longest]}"
        yield Problem(key, place(key), reason, budget, expected)
    if values.get("kv_cache.memory") and values.get("kv_cache.num_blocks"):
        key = "kv_cache.num_blocks"
        expected = f"one of the two (kv_cache.memory stands in {place('kv_cache.memory')})"
        reason = "kv_cache.memory gives the size of the cache already"
        yield Problem(key, place(key), reason, values[key], expected)
    key = "kv_cache.swap_space"
    if values.get("scheduler.preemption_mode") == "swap" and key in values:
        room = values[key]
        if room is None or bytes_in(room) == 0:
            reason = "scheduler.preemption_mode swap needs room on the host"
            yield Problem(key, place(key), reason, room, 'a size such as "1GiB"')


def _check_plugins(
    values: Mapping[str, Any], place: Place, plugins: Plugins | None
) -> tuple[Plugins | None, list[Problem]]:
    """The plugins, loaded if they are not given, and what is wrong with the components named."""
    if "plugins.allow" not in values or "plugins.deny" not in values:
        return None, []  # what may be imported is not known; why not is a problem already
    try:
        if plugins is None:
            plugins = Plugins.load(values["plugins.allow"], values["plugins.deny"])
    except UnknownPluginError as error:
        problems = [
            Problem(key, "environment" if key == VARIABLE else place(key), reason)
            for key, reason in error.reasons.items()
        ]
        if list(error.reasons) != ["plugins.allow"]:
            return None, problems  # a plugin that was to be denied must not be imported
        known = [n for n in values["plugins.allow"] if any(i.answers_to(n) for i in installed())]
        plugins = Plugins.load(known, values["plugins.deny"])
        return plugins, problems + list(check_components(values, plugins, place, complete=False))
    return plugins, list(check_components(values, plugins, place))
