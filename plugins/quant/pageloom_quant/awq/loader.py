"""The AWQ weight loader."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from pageloom_quant.awq.settings import AWQSettings, read_settings
from pageloom_quant.checkpoint import WORD, Layout, PackedCheckpointLoader

if TYPE_CHECKING:
    import torch

    from pageloom_quant.packed import PackedWeight

MIDDLE = 8  # of the codes 0 to 15


class AWQLoader(PackedCheckpointLoader):
    """Reads models that were quantized activation-aware (Lin et al. 2024, arXiv:2306.00978).

    The layout is the one AutoAWQ calls GEMM: ``qweight`` int32 ``[in, out / 8]`` with eight codes
    in each number, ``qzeros`` int32 ``[in / group, out / 8]`` likewise, and ``scales``
    ``[in / group, out]``; ``weight = (code - zero) * scale``. Without ``qzeros``, which symmetric
    models may lack, every zero is 8.
    """

    METHOD = "awq"
    PARTS = ("qweight", "qzeros", "scales")

    def read_settings(self) -> None:
        self._settings  # noqa: B018 (reads them)

    def layout(self, layer: str) -> Layout:
        in_features, words = self.part(layer, "qweight", ["int32"], [None, None]).shape
        size = self.group_size(layer, in_features, self._settings.group_size)
        return Layout(WORD * words, in_features, size)

    def packed_weight(
        self, layer: str, layout: Layout, outputs: slice, inputs: slice
    ) -> PackedWeight:
        from pageloom_quant.awq.layout import unpack
        from pageloom_quant.packed import PackedWeight

        size = layout.group_size
        stored = layout.inputs // size
        groups = slice(inputs.start // size, inputs.stop // size)
        words = slice(outputs.start // WORD, outputs.stop // WORD)
        qweight = self.part(layer, "qweight", ["int32"], [None, None])[inputs, words]
        scales = self.scales(layer, "scales", [stored, layout.outputs], (groups, outputs))
        zeros: torch.Tensor | int = MIDDLE
        if self._settings.zero_point or f"{layer}.qzeros" in self.checkpoint.files:
            packed = self.part(layer, "qzeros", ["int32"], [stored, layout.outputs // WORD])
            zeros = unpack(packed[groups, words]).float()
        codes, minimums = unpack(qweight).T, scales.float() * -zeros
        return PackedWeight.from_codes(
            codes.contiguous(), scales.T.contiguous(), minimums.T.contiguous()
        )

    @cached_property
    def _settings(self) -> AWQSettings:
        try:
            return read_settings(self.checkpoint.quantization())
        except ValueError as error:
            raise self.config_error(str(error)) from error
