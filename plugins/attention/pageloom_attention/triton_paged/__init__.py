"""Paged attention on NVIDIA and AMD GPUs, in Triton.

``kernels`` is all that runs on the GPU, with ``formats`` for coded K and V, ``work`` cuts a step
into what one program does, ``tiles`` holds the fixed choices of tile sizes, and ``launch`` says
with which constants a kernel is compiled. Importing this imports no triton.
"""

from pageloom_attention.triton_paged.backend import TritonPaged

__all__ = ["TritonPaged"]
