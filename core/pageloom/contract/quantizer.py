"""KV-cache formats.

A quantizer is a format with a reference implementation in torch: how one K or V vector of one
head becomes bytes, and back. A format whose bytes follow a `VectorLayout` says so, and a backend
whose kernels know that layout reads and writes it itself; every other pair of format and backend
goes through `encode` and `decode`, slower but right.

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
            x = x.float().clamp(-65504, 65504).to(torch.float16)
            return x.contiguous().view(torch.uint8)

        def decode(self, data, layer, kind, dtype):
            # A copy always: where the bytes lie need not be aligned.
            packed = data.clone(memory_format=torch.contiguous_format)
            return packed.view(torch.float16).to(dtype)

Then ``kv_cache: {quantizer: fp16}`` in the YAML.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from pageloom.contract.component import Component

if TYPE_CHECKING:
    import torch

Kind = Literal["k", "v"]
Element = Literal["fp8_e4m3", "fp8_e5m2", "int8", "int4"]
Scaling = Literal["static", "token_head"]


@dataclass(frozen=True, slots=True)
class VectorLayout:
    """What a coded vector's bytes mean, for kernels that read and write them themselves.

    All arithmetic is float32; rounding is to nearest, ties to even. ``x`` is a vector's element,
    ``c`` its code. Codes come first, a byte each; of ``int4`` two share a byte, the one of even
    index in the low half.

    ``static``: nothing else is stored, ``s`` is `KVQuantizer.static_scale`, and ``c`` is ``x *
    (1 / s)``, limited to the largest finite number (fp8: 448 for e4m3, 57344 for e5m2), to -127 ..
    127 (int8) or to -7 .. 7 (int4, which is stored as c + 8). ``x`` is read as ``c * s``. NaN stays
    NaN: in fp8 by itself, as int8 -128, and as the stored int4 0.

    ``token_head``: each vector carries its own scale behind its codes, in native byte order, and
    before it is coded ``x`` is limited to 7/8 of its dtype's largest finite number, for int4 to
    that of float16. A vector with a NaN has NaN for a scale, and so is NaN as a whole.

    - int8 has a float32 ``s = max(max |x|, 2^-100) / m``, where ``m`` is the limit above, and codes
      as above.
    - fp8 has the best of 16 such scales, ``s[i] = s[0] * 2^(i/16)`` with ``s[0]`` as in int8: the
      first for which ``(sum of r^2) * 2^(i/8)`` is least. ``r`` is the error ``(c - t) * 256 / d``
      rounded to a whole number, where ``t`` is what ``c`` was rounded from and ``d`` the difference
      between the two largest codes (e4m3: 32, e5m2: 8192). The powers of 2 are rounded once each;
      the sum is exact up to head size 1024.
    - int4 has a float16 ``s`` and a float16 ``b``: ``b = min x``, ``s = max((max x - b) / 15,
      2^-24)`` after ``b`` was rounded to float16, and ``c = (x - b) * (1 / s)`` with the rounded
      ``s``, limited to 0 .. 15. ``x`` is read as ``c * s + b``.

    .. versionchanged:: 1.2
        In fp8 a vector's scale is the best of 16; it was the first. ``x`` was limited to 0.99 of
        its dtype's largest number. All is read as before.
    """

    element: Element
    scaling: Scaling

    def bytes_per_vector(self, head_size: int) -> int:
        """Raises `ValueError` for a head size that the layout cannot hold."""
        if self.element == "int4" and head_size % 2:
            raise ValueError(f"int4 needs an even head size, not {head_size}")
        codes = head_size // 2 if self.element == "int4" else head_size
        return codes + (4 if self.scaling == "token_head" else 0)


class KVQuantizer(Component, ABC):
    """A format of K and V vectors. Stateless once `set_scales` was called; `encode` and `decode`
    are pure.

    Every vector is coded on its own: `encode` of a batch equals `encode` of its rows. Scales that
    are not constants lie inside the vector's bytes, so copying a block copies everything.
    """

    layout: ClassVar[VectorLayout | None] = None
    """The layout of the bytes, None if it is the format's own secret."""

    @property
    def wants_scales(self) -> bool:
        """Whether `set_scales` has a use for the checkpoint's scales. If not, it is given none, and
        they are not read: they may be anything.

        .. versionadded:: 1.2
        """
        return self.layout is None or self.layout.scaling == "static"

    def set_scales(self, num_layers: int, scales: Mapping[tuple[int, Kind], float]) -> None:
        """The scales that came with the model's weights (`WeightLoader.kv_scales`), by layer and
        kind. Called once, before anything is coded. Raises `ValueError` for scales of no use."""
        return

    def static_scale(self, layer: int, kind: Kind) -> float:
        """The scale of a layer, finite and above 0, where ``layout.scaling`` is ``"static"``."""
        raise NotImplementedError(f"{type(self).__name__} has no static scales")

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
        """Decode ``uint8 [..., bytes_per_vector]``, maybe strided and at any address, to ``dtype
        [..., head_size]``. Must not change ``data``."""
