"""The interpolations ``${env:NAME}``, ``${env:NAME,default}`` and ``${pkg:MODULE/FILE}``."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from pageloom.errors import shorten, suggest


def environment(name: Any = "", *default: Any) -> Any:
    """The environment variable ``name``, or the default.

    Raises `ValueError` when the variable is not set and there is no default.
    """
    name = str(name)
    if not name or len(default) > 1:
        raise ValueError("not of the form ${env:NAME} or ${env:NAME,DEFAULT}")
    if name in os.environ:
        return os.environ[name]
    if not default:
        raise ValueError(
            f"the environment variable {name} is not set; set it, or write ${{env:{name},DEFAULT}}"
        )
    return default[0]


def package_file(location: Any = "", *more: Any) -> str:
    """The path of a file inside an installed Python package, which is not imported.

    ``location`` is ``MODULE/PATH/OF/FILE``. Raises `ValueError` when there is no such package or
    no such file in it.
    """
    location = ",".join(map(str, (location, *more)))  # a comma separates arguments
    module, _, inside = location.partition("/")
    if not module.isidentifier() or not inside or not _below(Path(inside)):
        raise ValueError(f"{shorten(location)!r} is not of the form MODULE/FILE")
    spec = importlib.util.find_spec(module)
    if spec is None:
        package = module.replace("_", "-")
        raise ValueError(
            f"the Python package {module} is not installed; try: pip install {package}"
        )
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    for folder in folders:
        if (folder / inside).is_file():
            return str(folder / inside)
    files = [
        str(file.relative_to(folder))
        for folder in folders
        for file in folder.rglob("*")
        if file.is_file() and file.suffix not in (".py", ".pyc")
    ]
    raise ValueError(
        f"the Python package {module} has no file {shorten(inside)!r}; {suggest(inside, files)}"
    )


def _below(path: Path) -> bool:
    """Whether the path cannot lead out of the folder that it is joined to."""
    return not path.is_absolute() and ".." not in path.parts


def register_resolvers() -> None:
    """Make both known to OmegaConf, whose table of resolvers is global."""
    OmegaConf.register_resolver("env", environment, replace=True)
    OmegaConf.register_resolver("pkg", package_file, replace=True)


def escape(value: Any) -> Any:
    """``value`` with every text written so that OmegaConf takes it literally."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda match: 2 * match[1] + r"\${", value)
    if isinstance(value, dict):
        return {key: escape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [escape(item) for item in value]
    return value
