"""The compressed-tensors weight loader."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from pageloom_quant.checkpoint import WORD, Layout, PackedCheckpointLoader
from pageloom_quant.compressed_tensors.settings import Scheme, Settings, read_settings

if TYPE_CHECKING:
    import torch

    from pageloom_quant.packed import PackedWeight

OFFSET = 8  # what the codes 0 to 15 have been moved by from -8 to 7


class CompressedTensorsLoader(PackedCheckpointLoader):
    """Reads weights of 4 bits in the format ``pack-quantized``.

    ``weight_packed`` int32 ``[out, in / 8]`` holds eight codes in each number, the first in the
    lowest four bits; ``weight_scale`` is ``[out, in / group]``, or ``[out, 1]`` by the strategy
    ``channel``; asymmetric weights have ``weight_zero_point`` of that shape, packed along the
    outputs likewise, or int8 and not packed in older files; ``weight_shape`` is ``[2]``.
    ``weight = (code - zero) * scale`` with codes and zeros from -8 to 7.
    """

    METHOD = "compressed-tensors"
    PARTS = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape")

    def read_settings(self) -> None:
        self._settings  # noqa: B018 (reads them)

    def layout(self, layer: str) -> Layout:
        rows, words = self.part(layer, "weight_packed", ["int32"], [None, None]).shape
        scheme = self._scheme(layer)
        self._check_shape(layer, [rows, WORD * words])
        return Layout(rows, WORD * words, self.group_size(layer, WORD * words, scheme.group_size))

    def packed_weight(
        self, layer: str, layout: Layout, outputs: slice, inputs: slice
    ) -> PackedWeight:
        import torch

        from pageloom_quant.packed import PackedWeight

        size = layout.group_size
        stored = [layout.outputs, layout.inputs // size]
        read = outputs, slice(inputs.start // size, inputs.stop // size)
        scales = self.scales(layer, "weight_scale", stored, read)
        zeros: torch.Tensor | int = OFFSET
        if not self._scheme(layer).symmetric:
            zeros = OFFSET + self._zeros(layer, *stored)[read]
        packed = self.part(layer, "weight_packed", ["int32"], [None, None])[outputs]
        # The bytes of little-endian numbers are the pairs of codes that a packed weight holds.
        codes = packed.contiguous().view(torch.uint8)[:, inputs.start // 2 : inputs.stop // 2]
        return PackedWeight(codes, scales, scales.float() * -zeros, size)

    @cached_property
    def _settings(self) -> Settings:
        try:
            return read_settings(self.checkpoint.quantization())
        except ValueError as error:
            raise self.config_error(str(error)) from error

    def _scheme(self, layer: str) -> Scheme:
        try:
            scheme = self._settings.scheme_of(layer)
        except ValueError as error:
            raise self.config_error(str(error)) from error
        if scheme is None:
            raise self.tensor_error(
                f"{layer}.{self.PARTS[0]}", "but config.json says that this layer is not quantized"
            )
        if scheme.symmetric and f"{layer}.weight_zero_point" in self.checkpoint.files:
            raise self.tensor_error(
                f"{layer}.weight_zero_point", "but config.json says that its codes are symmetric"
            )
        return scheme

    def _check_shape(self, layer: str, stored: list[int]) -> None:
        shape = self.part(layer, "weight_shape", ["int64", "int32"], [2]).tolist()
        if shape != stored:
            raise self.tensor_error(
                f"{layer}.weight_shape", f"which says {shape}, but the codes are {stored}"
            )

    def _zeros(self, layer: str, rows: int, groups: int) -> torch.Tensor:
        """The zero points of asymmetric codes, float32 ``[rows, groups]``."""
        import torch

        from pageloom_quant.kv.codes import unpack_nibbles

        name = f"{layer}.weight_zero_point"
        if name in self.checkpoint.files and self.checkpoint.tensor(name).dtype == torch.int8:
            return self.part(layer, "weight_zero_point", ["int8"], [rows, groups]).float()
        packed = self.part(layer, "weight_zero_point", ["int32"], [-(-rows // 8), groups])
        codes = unpack_nibbles(packed.T.contiguous().view(torch.uint8))
        return codes[:, :rows].T - OFFSET
