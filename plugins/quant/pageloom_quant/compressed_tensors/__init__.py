"""Checkpoints in the format of compressed-tensors, as llm-compressor writes them."""

from pageloom_quant.compressed_tensors.loader import CompressedTensorsLoader

__all__ = ["CompressedTensorsLoader"]
