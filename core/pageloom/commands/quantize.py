"""``pageloom quantize``: a checkpoint of fewer bits from a plain one."""

from __future__ import annotations

import enum
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from pageloom.commands.files import require_folder_of
from pageloom.errors import PageloomError, counted


class Method(enum.StrEnum):
    AWQ = "awq"


def quantize(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A file, a folder or a hub id of plain weights.")
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The new folder to write.")],
    method: Annotated[
        Method, typer.Option(help="How codes are found; needs the package autoawq.")
    ] = Method.AWQ,
    calibration: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Text like the model's work. Default: English prose."),
    ] = None,
    group_size: Annotated[int, typer.Option(help="Weights that share a scale.")] = 128,
    samples: Annotated[int, typer.Option(min=1, help="Windows of text to calibrate on.")] = 32,
    length: Annotated[int, typer.Option(min=1, help="Tokens of a window.")] = 512,
) -> None:
    """Quantize the linear layers of a model to 4 bits, and write it as a Hugging Face folder.

    The search is that of AutoAWQ, which is no longer developed: it is used for this command alone,
    and what it writes is read without it.
    """
    from pageloom.quantize import awq
    from pageloom.quantize.calibration import calibration_text, cut_windows

    awq.require_autoawq()
    awq.check_group_size(group_size)
    if out.exists():
        raise PageloomError(f"{out} exists already; --out takes a new folder")
    require_folder_of(out)
    text = calibration_text(calibration)
    from pageloom.quantize.model import open_model

    print(f"Reading {model} ...", file=sys.stderr)
    plain = open_model(model)
    windows = cut_windows(plain.tokenizer, text, samples, length)
    print(f"Calibrating on {counted(len(windows), 'window')} of {length} tokens", file=sys.stderr)
    config = awq.quantize(plain.network, windows, group_size)
    with _new_folder(out) as folder:
        plain.save(config, folder)
    print(f"{out} holds the model with {awq.BITS}-bit weights in groups of {group_size}")


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill, which takes the name ``folder`` when it is complete."""
    try:
        with tempfile.TemporaryDirectory(prefix=".", dir=folder.absolute().parent) as temporary:
            filled = Path(temporary, folder.name)
            filled.mkdir()
            yield filled
            filled.rename(folder)
    except OSError as error:
        raise PageloomError(f"{folder} cannot be written: {error.strerror}") from error
