"""Files that a command writes. What cannot be written is a `PageloomError`."""

from __future__ import annotations

from pathlib import Path

from pageloom.errors import PageloomError


def require_folder_of(file: Path | None) -> None:
    """Say so before hours of work if ``file`` could not be written after them."""
    if file is not None and not file.absolute().parent.is_dir():
        raise PageloomError(f"{file} cannot be written: there is no folder {file.parent}")


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PageloomError(f"{folder} cannot be made: {error.strerror}") from error


def write_file(file: Path, data: bytes) -> None:
    try:
        file.write_bytes(data)
    except OSError as error:
        raise PageloomError(f"{file} cannot be written: {error.strerror}") from error
