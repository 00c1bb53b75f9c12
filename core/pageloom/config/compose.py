"""The layers of a configuration: the files that ``extends`` composes, then each ``--set``."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pageloom.config.errors import Problem
from pageloom.config.reader import Document, read_yaml
from pageloom.config.schema import PICKERS
from pageloom.errors import nearest, shorten

_KEY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_][\w-]*)*")


_LONGEST_CHAIN = 100  # of files that extend each other


@dataclass
class Layer:
    """What one file, or one ``--set``, says. Later layers win."""

    values: dict[str, Any]
    origins: dict[str, str]

    def picks(self) -> bool:
        """Whether it names a component."""
        sections = [(self.values.get(picker.section), picker.field) for picker in PICKERS]
        return any(isinstance(values, dict) and name in values for values, name in sections)


class Composer:
    """Reads the layers, lowest first. ``broken`` is true when a file could not be read."""

    def __init__(self) -> None:
        self.layers: list[Layer] = []
        self.problems: list[Problem] = []
        self.broken = False
        self._read: set[Path] = set()

    def add_file(self, path: Path) -> None:
        """Add a file and, below it, those that it extends."""
        self._add_file(path, "", _display(path), ())

    def add_overrides(self, overrides: Sequence[str]) -> None:
        """Add ``KEY=VALUE`` texts, each value being YAML.

        Those that name a component go first: naming another one drops the options of the former,
        and the order on a command line should not matter for that.
        """
        layers = [layer for text in overrides if (layer := self._override(text))]
        self.layers += sorted(layers, key=lambda layer: not layer.picks())

    def _add_file(self, path: Path, key: str, where: str, chain: tuple[Path, ...]) -> None:
        try:
            resolved = path.resolve()
        except (ValueError, RuntimeError) as error:  # a null character, or a circle of links
            self._broken(Problem(key, where, f"not a path: {shorten(str(error))}"))
            return
        if len(chain) > _LONGEST_CHAIN:
            reason = f"files extend each other in a chain of more than {_LONGEST_CHAIN}"
            self._broken(Problem(key, where, reason))
            return
        if resolved in chain:
            cycle = " -> ".join(_display(p) for p in (*chain[chain.index(resolved) :], resolved))
            self.problems.append(
                Problem(key, where, f"files extend each other in a cycle: {cycle}")
            )
            return
        if resolved in self._read:
            return  # two files extend it: it counts once, where it came first
        self._read.add(resolved)
        text, failure = _read_text(path)
        if failure:
            self._broken(Problem(key, where, failure))
            return
        shown = _display(path)
        document = read_yaml(text, lambda line: f"{shown}:{line}")
        self.problems += document.problems
        if not isinstance(document.values, dict):
            self._not_a_mapping(document, shown)
            return
        for base in self._extends(document):
            place = document.origins["extends"]
            self._add_file(path.parent / base, "extends", place, (*chain, resolved))
        document.values.pop("extends", None)
        self.layers.append(Layer(document.values, document.origins))

    def _extends(self, document: Document) -> list[str]:
        named = document.values.get("extends", [])
        bases = [named] if isinstance(named, str) else named
        if isinstance(bases, list) and all(isinstance(base, str) and base for base in bases):
            return bases
        place = document.origins["extends"]
        self._broken(Problem("extends", place, "", named, "a path, or a list of paths"))
        return []

    def _not_a_mapping(self, document: Document, shown: str) -> None:
        self.broken = True
        if document.problems:
            return  # it could not be parsed, which is reported
        empty = document.values is None
        reason = "the file is empty" if empty else "the file is not a mapping"
        expected = "sections such as 'model:' with their settings indented below"
        self.problems.append(Problem("", shown, reason, expected=expected))

    def _override(self, text: str) -> Layer | None:
        where = f"--set {shorten(text)}"
        key, equals, value = text.partition("=")
        if not equals or not _KEY.fullmatch(key):
            expected = "KEY=VALUE, such as scheduler.max_num_seqs=64"
            self.problems.append(Problem("", where, expected=expected))
            return None
        if key == "extends":
            self.problems.append(Problem(key, where, "it belongs in a file"))
            return None
        document = read_yaml(value, lambda line: where, key)
        self.problems += document.problems
        if document.problems:
            return None
        values, origins = document.values, document.origins
        parts = key.split(".")
        for i in range(len(parts), 0, -1):
            values = {parts[i - 1]: values}
            origins[".".join(parts[:i])] = where
        return Layer(values, origins)

    def _broken(self, problem: Problem) -> None:
        self.broken = True
        self.problems.append(problem)


def _read_text(path: Path) -> tuple[str, str]:
    """The text of a file, or why it cannot be had."""
    shown = _display(path)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        folder = path.parent
        files = [file.name for file in folder.iterdir()] if folder.is_dir() else []
        guess = nearest(path.name, files)
        hint = f"; did you mean {_display(folder / guess)}?" if guess else ""
        return "", f"there is no file {shown}{hint}"
    except IsADirectoryError:
        return "", f"{shown} is a directory, not a YAML file"
    except OSError as error:
        return "", f"{shown} cannot be read: {error.strerror}"
    try:
        return data.decode("utf-8-sig"), ""
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        return "", f"{shown} is not UTF-8 text (line {line})"


def _display(path: Path) -> str:
    """Relative to the working directory if it lies below it."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
