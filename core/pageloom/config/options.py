"""Options of components: the free part of a configuration, checked against each ``Config``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf

from pageloom.config.errors import ConfigError, Problem
from pageloom.config.resolvers import escape
from pageloom.config.typed import assign, evaluate, structure
from pageloom.contract import Component
from pageloom.errors import one_line
from pageloom.plugins import pass_on_signals

_WHERE = "options"


def build_options(component: type[Component], options: Mapping[str, Any]) -> Any:
    """The instance of ``component.Config`` that ``options`` describe.

    ``options`` are what `load_config` left in a section: resolved, so ``${`` means nothing here.
    Raises `ConfigError`, its keys relative to the options, with every problem found.
    """
    try:
        tree = structure(component.Config)
    except (Exception, SystemExit) as error:
        pass_on_signals(error)
        reason = f"{component.__qualname__}.Config cannot be filled from YAML: {one_line(error)}"
        raise ConfigError([Problem("", _WHERE, reason)]) from error
    problems = list(assign(tree, escape(dict(options)), lambda key: _WHERE))
    given = {problem.key for problem in problems}
    for key, _, problem in evaluate(tree, lambda key: _WHERE):
        if problem and key not in given:
            problems.append(problem)
    if problems:
        raise ConfigError(problems)
    try:
        return OmegaConf.to_object(tree)
    except ValueError as error:  # from __post_init__: said to the user as it is
        raise ConfigError([Problem("", _WHERE, str(error))]) from error
    except (Exception, SystemExit) as error:
        pass_on_signals(error)
        reason = f"{component.__qualname__}.Config failed: {one_line(error)}"
        raise ConfigError([Problem("", _WHERE, reason)]) from error


def option_names(component: type[Component]) -> list[str]:
    """The names of the options that a component takes."""
    config = component.Config
    return [f.name for f in dataclasses.fields(config)] if dataclasses.is_dataclass(config) else []
