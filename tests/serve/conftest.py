"""What the server's tests share: one tiny model, and one server of it that nobody may end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import ServerProcess, start_server

from pageloom import Engine
from tiny_text_model import write_tiny_model


@pytest.fixture(scope="session")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration of a random model with a tokenizer and a chat template, called "tiny"."""
    return write_tiny_model(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="session")
def server(config: Path) -> Iterator[ServerProcess]:
    """A server with the defaults. For one that is configured otherwise, or that ends, use
    `start_server`."""
    with start_server(config) as running:
        yield running


@pytest.fixture(scope="session")
def offline(config: Path) -> Engine:
    """The engine that the server has, in this process: whatever it says, the server must say."""
    return Engine.from_config(config)
