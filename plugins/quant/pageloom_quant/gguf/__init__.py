"""GGUF model files: weights, configuration and tokenizer in one file."""

from pageloom_quant.gguf.loader import GGUFLoader

__all__ = ["GGUFLoader"]
