"""What every format of the KV cache must do, as a pytest suite to inherit.

For a package that has the format of `pageloom.contract.quantizer`'s example, two files more.
``pyproject.toml``::

    [project.optional-dependencies]
    test = ["pageloom[testing]"]

``test_half.py``::

    from pageloom.testing import KVFormatSuite

    class TestHalf(KVFormatSuite):
        quantizer = "fp16"

Then ``pytest -rs``, which also tells which head sizes and backends were refused, and why.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar

import pytest
import torch

from pageloom.contract import KVQuantizer
from pageloom.plugins import Plugins
from pageloom.testing.attention_candidate import Candidate, RefusedError
from pageloom.testing.attention_cases import Case, layer
from pageloom.testing.attention_rig import Rig
from pageloom.testing.attention_steps import copied_blocks, mixed_steps, swapped_blocks

_HEAD_SIZES = (33, 64, 80, 128, 256)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_CASE = Case((layer(), layer(4, 2, 128)))


class KVFormatSuite:
    """Inherit it in a class named ``Test...`` and say which format.

    A head size that `KVQuantizer.bytes_per_vector` refuses is skipped with the reason it gives,
    and so is a backend that refuses the format.
    """

    quantizer: ClassVar[str | type[KVQuantizer]]
    """A registered name, or a class that is not registered."""

    options: ClassVar[Mapping[str, Any]] = {}
    """Fields of the format's ``Config``, as ``kv_cache.options`` in the YAML."""

    device: ClassVar[str] = "cpu"

    largest_error: ClassVar[float] = 0.15
    """Of normally distributed vectors: the root mean square of the error, by that of the vectors.
    Four bits in even steps have some 0.1, eight bits of which three are mantissa some 0.03."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "head_size" in metafunc.fixturenames:
            metafunc.parametrize("head_size", _HEAD_SIZES)
        if "backend" in metafunc.fixturenames:
            metafunc.parametrize("backend", _plugins().names("attention_backend"))

    # The bytes.

    @pytest.mark.parametrize("dtype", _DTYPES, ids=str)
    def test_vectors_of_every_dtype_become_bytes_and_back(
        self, head_size: int, dtype: torch.dtype
    ) -> None:
        coder, x = self.coder(head_size), self.vectors(head_size, dtype)
        for kind in ("k", "v"):
            data = coder.encode(x, 1, kind)
            assert data.dtype == torch.uint8
            assert data.device == x.device
            assert data.shape == (*x.shape[:-1], coder.bytes_per_vector(head_size))
            for wanted in _DTYPES:
                decoded = coder.decode(data, 1, kind, wanted)
                assert decoded.dtype == wanted
                assert decoded.shape == x.shape
                error = (decoded.double() - x.double()).square().mean().sqrt()
                assert error <= self.largest_error * x.double().square().mean().sqrt()

    def test_arguments_are_not_changed_and_nothing_is_remembered(self, head_size: int) -> None:
        coder, x = self.coder(head_size), self.vectors(head_size)
        before = x.clone()
        data = coder.encode(x, 0, "k")
        assert torch.equal(x, before), "encode must not change its argument"
        kept = data.clone()
        decoded = coder.decode(data, 0, "k", torch.float32)
        assert torch.equal(data, kept), "decode must not change its argument"
        coder.encode(-3 * x, 0, "k")
        assert torch.equal(coder.encode(x, 0, "k"), data), "encode must be pure"
        assert torch.equal(coder.decode(data, 0, "k", torch.float32), decoded)

    def test_a_batch_is_coded_like_its_vectors(self, head_size: int) -> None:
        coder, x = self.coder(head_size), self.vectors(head_size)
        data = coder.encode(x, 0, "v")
        decoded = coder.decode(data, 0, "v", torch.float32)
        for i in range(x.shape[0]):
            for j in range(x.shape[1]):
                alone = coder.encode(x[i, j], 0, "v")
                assert torch.equal(alone, data[i, j])
                assert torch.equal(coder.decode(alone, 0, "v", torch.float32), decoded[i, j])
        assert coder.encode(x[:0], 0, "v").shape == data[:0].shape

    def test_vectors_and_bytes_may_lie_anywhere(self, head_size: int) -> None:
        coder, x = self.coder(head_size), self.vectors(head_size)
        data = coder.encode(x, 0, "k")
        decoded = coder.decode(data, 0, "k", torch.float32)
        for strided in _strided(x):
            assert torch.equal(coder.encode(strided, 0, "k"), data)
        for strided in _strided(data):
            assert torch.equal(coder.decode(strided, 0, "k", torch.float32), decoded)

    @pytest.mark.parametrize("dtype", _DTYPES, ids=str)
    def test_what_is_too_large_saturates(self, head_size: int, dtype: torch.dtype) -> None:
        coder, x = self.coder(head_size), self.vectors(head_size, dtype)
        x[0, 0, 1], x[0, 1, 2], x[1, 0, 0] = torch.inf, -torch.inf, torch.finfo(dtype).max
        data = coder.encode(x, 0, "k")
        assert coder.decode(data, 0, "k", dtype).isfinite().all()

    def test_the_zero_vector_is_a_vector(self, head_size: int) -> None:
        """Backends store it, to have something to read where a sequence has no token."""
        coder = self.coder(head_size)
        data = coder.encode(torch.zeros(2, head_size, device=self.device), 0, "k")
        assert not coder.decode(data, 0, "k", torch.float32).any()

    # The cache.

    def test_attention_over_what_is_stored(self, backend: str) -> None:
        mixed_steps(self.rig(backend))

    def test_blocks_are_moved_unchanged(self, backend: str) -> None:
        copied_blocks(self.rig(backend))
        swapped_blocks(self.rig(backend))

    # What the tests are made of.

    @classmethod
    def format(cls) -> type[KVQuantizer]:
        chosen: str | type[KVQuantizer] | None = getattr(cls, "quantizer", None)
        if chosen is None:
            raise TypeError(f'{cls.__name__} must say which format it tests: quantizer = "name"')
        if isinstance(chosen, str):
            found: type[KVQuantizer] = _plugins().get("kv_quantizer", chosen)
            return found
        return chosen

    def coder(self, head_size: int) -> KVQuantizer:
        """The format, for this head size; a refusal skips the test."""
        chosen = self.format()
        coder = chosen(chosen.Config(**self.options))
        try:
            coder.bytes_per_vector(head_size)
        except ValueError as error:
            pytest.skip(str(error))
        return coder

    def vectors(self, head_size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        generator = torch.Generator().manual_seed(head_size)
        return torch.randn(5, 3, head_size, generator=generator).to(self.device, dtype)

    def rig(self, backend: str) -> Rig:
        """A backend that stores by the format; a refusal skips the test."""
        chosen, options = self.format(), self.options

        class WithOptions(chosen):  # type: ignore[misc, valid-type]
            def __init__(self, config: Any) -> None:
                super().__init__(chosen.Config(**options))

        name = self.quantizer if isinstance(self.quantizer, str) else chosen.__name__
        candidate = Candidate(
            backend,
            _plugins().get("attention_backend", backend),
            torch.device(self.device),
            quantizers={name: lambda: WithOptions},
        )
        try:
            return Rig(candidate, replace(_CASE, quantizer=name))
        except RefusedError as error:
            pytest.skip(str(error))


def _strided(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """The same numbers, lying otherwise in memory."""
    yield x.transpose(0, 1).contiguous().transpose(0, 1)
    yield x.movedim(-1, 0).contiguous().movedim(0, -1)
    yield torch.stack([x, x], dim=-1)[..., 0]
    beside = torch.cat([x[..., :1], x, x[..., :2]], dim=-1)
    yield beside[..., 1:-2]
    # One after another from an odd place on.
    yield torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape)


@cache
def _plugins() -> Plugins:
    return Plugins.load()
