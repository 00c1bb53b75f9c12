"""KV-cache formats.

A quantizer is a format with a reference implementation in torch: how one K or V vector of one
head becomes bytes, and back. A backend whose kernels read the format natively says so by name in
`AttentionBackend.native_quantizers`; every other backend runs it through `encode` and `decode`,
slower but right.

A whole plugin, two files. ``pyproject.toml``::

    [project]
    name = "pageloom-half"
    version = "0.1"
    dependencies = ["pageloom"]

    [project.entry-points.pageloom]
    half = "pageloom_half"

``pageloom_half.py``::

    import torch
    from pageloom.contract import KVQuantizer, hookimpl

    contract_version = "1.0"

    @hookimpl
    def register_kv_quantizers(register):
        register("fp16", "pageloom_half:Half")

    class Half(KVQuantizer):
        def bytes_per_vector(self, head_size):
            return 2 * head_size

        def encode(self, x, layer, kind):
            return x.to(torch.float16).view(torch.uint8)

        def decode(self, data, layer, kind, dtype):
            return data.view(torch.float16).to(dtype)

Then ``kv_cache: {quantizer: fp16}`` in the YAML.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Literal

from pageloom.contract.component import Component

if TYPE_CHECKING:
    import torch

Kind = Literal["k", "v"]


class KVQuantizer(Component, ABC):
    """A format of K and V vectors. Stateless after construction; `encode` and `decode` are pure.

    Every vector is coded on its own: `encode` of a batch equals `encode` of its rows. Scales that
    are not constants lie inside the vector's bytes, so copying a block copies everything.
    """

    @abstractmethod
    def bytes_per_vector(self, head_size: int) -> int:
        """Bytes that one vector of ``head_size`` elements takes, scales and padding included.

        Raises `ValueError` when the format cannot hold this head size.
        """

    @abstractmethod
    def encode(self, x: torch.Tensor, layer: int, kind: Kind) -> torch.Tensor:
        """Code vectors ``x [..., head_size]`` (floating, maybe strided) as ``uint8 [...,
        bytes_per_vector]``.

        ``layer`` and ``kind`` tell formats with scales per layer which one applies. Must saturate
        rather than produce infinities, on the device of ``x``, and must not change ``x``.
        """

    @abstractmethod
    def decode(
        self, data: torch.Tensor, layer: int, kind: Kind, dtype: torch.dtype
    ) -> torch.Tensor:
        """Decode ``uint8 [..., bytes_per_vector]`` to ``dtype [..., head_size]``."""
