"""The backend does what every attention backend must, with any tile."""

import pytest
from pageloom_example_attention.blockwise import Blockwise

from pageloom.testing import AttentionSuite


class TestBlockwise(AttentionSuite):
    backend = "blockwise"


class TestOneBlockAtATime(AttentionSuite):
    backend = "blockwise"
    options = {"blocks_per_tile": 1}
    scale = "small"


def test_a_tile_has_at_least_one_block():
    with pytest.raises(ValueError, match="at least 1, not 0"):
        Blockwise.Config(blocks_per_tile=0)
