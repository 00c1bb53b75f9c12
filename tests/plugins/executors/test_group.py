"""Ranks that do not reach each other say so, and not that the fault is their own."""

from __future__ import annotations

import socket

import pytest
import torch
import torch.distributed as dist

from pageloom.contract import Rank
from pageloom_executors.group import GroupError, connect, open_store


def test_a_store_that_is_not_there():
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
        with pytest.raises(GroupError, match=rf"^the store at 127\.0\.0\.1:{port}: "):
            open_store("127.0.0.1", port, is_master=False, timeout_seconds=1)


def test_a_rank_that_ends_before_all_are_connected():
    store = open_store("127.0.0.1", 0, is_master=True)
    store.set("here/1", "")
    with pytest.raises(GroupError, match=r"^other ranks: "):
        connect(Rank.of(0, 2, 1), store, torch.device("cpu"), 1.0)
    assert not dist.is_initialized()
