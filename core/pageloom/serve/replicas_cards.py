"""Which of this machine's cards each replica has."""

from __future__ import annotations

import os
from collections.abc import Mapping

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
    """The names by which this process may use cards."""
    if (given := os.environ.get(VISIBLE)) is not None:
        return [card for card in given.split(",") if card]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]
