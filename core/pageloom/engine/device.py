"""Where an engine or a benchmark runs."""

from __future__ import annotations

import torch

from pageloom.errors import PageloomError


def find_device(wanted: str, key: str) -> torch.device:
    """The device that the configuration names under ``key``: ``auto``, ``cpu``, ``cuda`` or
    ``cuda:N``. Raises `PageloomError` if this machine has no such GPU."""
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(wanted)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise PageloomError(
            f"{key} is {wanted}, but torch {torch.__version__} sees "
            f"{torch.cuda.device_count()} CUDA devices here; use cpu or auto"
        )
    return device
