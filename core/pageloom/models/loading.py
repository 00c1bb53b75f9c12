"""From a model path to the weight loader that reads it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pageloom.config import build_options
from pageloom.config.options import option_names
from pageloom.contract.checkpoint import (
    PICKLE_SUFFIXES,
    quantization,
    weight_files,
    why_no_weights,
)
from pageloom.discovery import PluginError
from pageloom.errors import PageloomError, one_line

if TYPE_CHECKING:
    from pageloom.contract import WeightLoader
    from pageloom.plugins import Plugins

KIND = "weight_loader"
AUTO = "auto"


def open_loader(
    plugins: Plugins,
    path: str,
    loader: str = AUTO,
    options: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> WeightLoader:
    """The loader named ``loader``, or with ``"auto"`` the one that detects its format in ``path``.

    ``trust_remote_code`` becomes the option of that name where the loader has one.

    Raises `PageloomError` when no loader or several detect it, when ``loader`` is not registered,
    and when ``options`` do not fit the loader.
    """
    name = _detect(plugins, path) if loader == AUTO else loader
    cls: type[WeightLoader] = plugins.get(KIND, name)
    given = dict(options or {})
    if trust_remote_code and "trust_remote_code" in option_names(cls):
        given.setdefault("trust_remote_code", True)
    return cls(build_options(cls, given), path)


def _detect(plugins: Plugins, path: str) -> str:
    names = sorted(plugins.names(KIND))
    found: list[str] = []
    failed: list[str] = []
    for name in names:
        try:
            loader: type[WeightLoader] = plugins.get(KIND, name)
            if loader.detect(path):
                found.append(name)
        except PluginError as error:
            failed.append(str(error))
        except Exception as error:  # one loader's fault must not hide the others
            failed.append(f"loader {name!r} could not tell: {one_line(error)}")
    if len(found) == 1:
        return found[0]
    if found:
        raise PageloomError(
            f"model.path {path} can be read by several loaders: set model.loader to one of "
            f"{', '.join(found)}"
        )
    try:
        why = _why_none(Path(path))
    except (OSError, ValueError) as error:
        why = f"cannot be read: {one_line(error)}"
    raise PageloomError(
        f"model.path {'; '.join([f'{path} {why}', *failed])} (asked the loaders "
        f"{', '.join(names)}; model.loader names one)"
    )


def _why_none(path: Path) -> str:
    """The nearest cause why no loader knows ``path``, as the end of a sentence about it."""
    if not path.exists():
        return "does not exist, and is not written like a hub id (org/name)"
    if path.is_file():
        if path.suffix in PICKLE_SUFFIXES:
            return "is pickled weights, which could run code when read; use safetensors or GGUF"
        if path.suffix == ".safetensors":
            return "is a weight file; give the folder that also holds its config.json"
        return "is a file in no format that a loader knows"
    if not path.is_dir():
        return "is neither a file nor a folder"
    if ggufs := sorted(path.glob("*.gguf")):
        return f"is a folder with GGUF files; name one of them, such as {ggufs[0].name}"
    if weight_files(path) and (method := quantization(path)) is not None:
        return f"holds weights quantized with {method!r}, which no loader here reads"
    return why_no_weights(path)
