"""AWQ checkpoints: 4-bit linear layers as AutoAWQ and its successors write them."""

from pageloom_quant.awq.loader import AWQLoader

__all__ = ["AWQLoader"]
