"""What the vLLM paper measured of KV memory, measured again on the control plane, without a model.

The paper: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention", SOSP 2023, arXiv:2309.06180. `paper` has its numbers.
"""
