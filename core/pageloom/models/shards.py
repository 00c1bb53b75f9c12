"""How a model is divided over ranks, in integers.

Layers are divided into stages, and within a stage each layer by its heads, by the width of its
MLP and by the vocabulary. What one tensor rank has of each is contiguous.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from pageloom.contract import Rank
from pageloom.models.architecture import DecoderArchitecture
from pageloom.models.model import UnsupportedModelError

TENSOR, PIPELINE = "parallel.tensor_parallel_size", "parallel.pipeline_parallel_size"


@dataclass(frozen=True, slots=True)
class Shard:
    """What one rank has of a decoder, as numbers within the whole model."""

    rank: Rank
    layers: range
    heads: range
    kv_heads: range
    vocabs: tuple[range, ...]  # of all tensor ranks, none of which has more than the first

    @classmethod
    def of(cls, arch: DecoderArchitecture, rank: Rank) -> Shard:
        """Raises `UnsupportedModelError` if the model cannot be divided over so many ranks."""
        ranks, mine = rank.tensor_size, rank.tensor_rank
        layers = divide(len(arch.windows), rank.stages, "layers", PIPELINE)
        heads = divide_heads(arch.num_heads, arch.num_kv_heads, ranks)
        vocab = divide(arch.vocab_size, ranks, "tokens of the vocabulary", TENSOR)
        return cls(rank, layers[rank.stage], *heads[mine], tuple(vocab))

    @property
    def vocab(self) -> range:
        """The tokens whose embeddings and logits this rank has."""
        return self.vocabs[self.rank.tensor_rank]

    def own(self, arch: DecoderArchitecture) -> DecoderArchitecture:
        """``arch`` with the layers and heads of this rank."""
        return replace(
            arch,
            num_heads=len(self.heads),
            num_kv_heads=len(self.kv_heads),
            windows=tuple(arch.windows[layer] for layer in self.layers),
        )

    def mlp(self, arch: DecoderArchitecture, unit: int = 1) -> range:
        """This rank's part of the width of an MLP, which is cut at multiples of ``unit``."""
        size, ranks = arch.intermediate_size, self.rank.tensor_size
        return divide(size, ranks, "MLP neurons", TENSOR, unit)[self.rank.tensor_rank]


def divide(size: int, parts: int, what: str, option: str, unit: int = 1) -> list[range]:
    """0 to ``size`` in consecutive ranges, as even as can be, larger ones first.

    Ranges begin at multiples of ``unit``. Raises `UnsupportedModelError` where one would be empty;
    ``what`` is divided and ``option`` says over how many.
    """
    units = -(-size // unit)
    if units < parts:
        each = f" in {units} groups of {unit}" if unit > 1 else ""
        raise UnsupportedModelError(
            f"{size} {what}{each} cannot be divided over {parts} ranks; set {option} to {units} or "
            "less."
        )
    least, larger = divmod(units, parts)
    ends = [min(size, unit * (least * n + min(n, larger))) for n in range(parts + 1)]
    return [range(start, end) for start, end in pairwise(ends)]


def divide_heads(num_heads: int, num_kv_heads: int, ranks: int) -> list[tuple[range, range]]:
    """Query heads and KV heads of each tensor rank.

    KV heads are divided as evenly as can be, and query heads go with the KV head that they share.
    Where there are fewer KV heads than ranks, several ranks have the same one, and its query heads
    are divided over them. Raises `UnsupportedModelError` where that is not possible evenly: all
    layers of a backend have as many query heads to each KV head.
    """
    group = num_heads // num_kv_heads
    if ranks <= num_kv_heads:
        divided = divide(num_kv_heads, ranks, "key-value heads", TENSOR)
        return [(range(group * kv.start, group * kv.stop), kv) for kv in divided]
    copies, rest = divmod(ranks, num_kv_heads)
    if rest:
        raise UnsupportedModelError(
            f"{num_kv_heads} key-value heads cannot be copied to {ranks} ranks evenly "
            f"({ranks} / {num_kv_heads} is not whole); set {TENSOR} to {num_kv_heads} or less, or "
            "to a multiple of it."
        )
    each, rest = divmod(group, copies)
    if rest:
        raise UnsupportedModelError(
            f"With {ranks} ranks each of {num_kv_heads} key-value heads would be on {copies}, over "
            f"which its query heads cannot be divided ({group} / {copies} is not whole); set "
            f"{TENSOR} to {num_kv_heads} or less."
        )
    return [
        (range(each * rank, each * (rank + 1)), range(rank // copies, rank // copies + 1))
        for rank in range(ranks)
    ]
