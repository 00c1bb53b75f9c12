"""Which of this machine's cards each replica has."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import takewhile

from pageloom.config import Config
from pageloom.engine.executor_choice import finds_devices
from pageloom.errors import PageloomError

VISIBLE = "CUDA_VISIBLE_DEVICES"


def environments(config: Config, replicas: int) -> list[Mapping[str, str]]:
    """What each replica's process finds in its environment beside all else, so that each has cards
    of its own. Nothing where there are none, or where the executor finds them.

    Raises `PageloomError` if there are too few.
    """
    if config.runtime.device == "cpu" or finds_devices(config):
        return [{}] * replicas
    if config.runtime.device.startswith("cuda:"):
        raise PageloomError(
            f"runtime.device is {config.runtime.device}, which is one card, but there are to be "
            f"{replicas} replicas; set it to cuda, and each takes cards of its own"
        )
    cards, each = visible_cards(), config.parallel.world_size
    if not cards:
        return [{}] * replicas
    if replicas * each > len(cards):
        raise PageloomError(
            f"{replicas} replicas of {each} ranks need {replicas * each} cards, but this machine "
            f"has {len(cards)}; lower parallel.replicas or parallel.max_replicas, or have "
            "parallel.executor ray find cards on other machines"
        )
    return [{VISIBLE: ",".join(cards[n * each : (n + 1) * each])} for n in range(replicas)]


def visible_cards() -> list[str]:
    """The names by which this process may use cards: of those that it was given, as many as CUDA
    finds, which stops at the first that is none."""
    given = os.environ.get(VISIBLE)
    names = None if given is None else list(takewhile(_names_a_card, given.split(",")))
    if names == []:
        return []
    import torch

    count = torch.cuda.device_count()
    return [str(number) for number in range(count)] if names is None else names[:count]


def _names_a_card(name: str) -> bool:
    """An index or a UUID; a negative index, like nothing at all, ends the list."""
    return bool(name.strip()) and not name.strip().startswith("-")
