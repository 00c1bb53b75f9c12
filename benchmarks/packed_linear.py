"""Packed linear layers beside the bfloat16 layer of the engine, in one interleaved run.

    python benchmarks/packed_linear.py [--rounds 9] [--rows 1,4,16,64,256] [--threads 1]

For each shape and number of rows: time of the packed layer over time of the engine's `Linear` with
the same weights expanded, the median of the rounds and their range, and the bytes that each holds.
Each side goes through several copies of the layer, more than a CPU's caches hold, as a model goes
through its layers. With one thread processor time is taken, which other work on the machine
disturbs less, and otherwise the time of a clock.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from pageloom.engine.memory_report import weight_bytes
from pageloom.ops.linear import Linear
from pageloom_quant.packed import PackedWeight, packed_linear

SHAPES = (  # outputs, inputs, bits
    (960, 576, 4),  # SmolLM2-135M: q, k and v
    (576, 1536, 4),  # its down projection
    (49152, 576, 8),  # its output layer
    (4096, 14336, 4),  # Llama-3-8B: its down projection
)
CACHE_BYTES = 64 << 20
CPU = torch.device("cpu")


@dataclass
class Result:
    outputs: int
    inputs: int
    bits: int
    rows: int
    packed_bytes: int
    plain_bytes: int
    ratios: list[float]  # of times, packed over plain, one per round
    seconds: float  # of the packed layer, the least

    def line(self) -> str:
        ratios = self.ratios
        return (
            f"{self.outputs:>6} x {self.inputs:<6} {self.bits} bits {self.rows:>5} rows: time "
            f"{statistics.median(ratios):.2f} of bfloat16's ({min(ratios):.2f} to "
            f"{max(ratios):.2f}), {self.seconds * 1e6:,.0f} us; memory "
            f"{self.packed_bytes / self.plain_bytes:.3f} of its"
        )


def random_weight(outputs: int, inputs: int, bits: int, group: int) -> PackedWeight:
    codes = torch.randint(256, (outputs, inputs * bits // 8), dtype=torch.uint8)
    scales = (torch.rand(outputs, inputs // group) + 0.5) / (1 << bits) / inputs**0.5
    # Formats of 4 bits mostly have zero points of their own, those of 8 bits do not.
    zeros = torch.full_like(scales, 128) if bits == 8 else torch.rand_like(scales) * 15
    scales = scales.half()
    return PackedWeight(codes, scales, (scales.float() * -zeros).half(), group, bits)


def seconds(layers: Sequence[nn.Module], x: torch.Tensor, clock: Callable[[], float]) -> float:
    """Of one layer."""
    start = clock()
    for layer in layers:
        layer(x)
    return (clock() - start) / len(layers)


@torch.inference_mode()
def measure(
    shape: tuple[int, int, int], rows: Sequence[int], rounds: int, group: int
) -> list[Result]:
    outputs, inputs, _ = shape
    weight = random_weight(*shape, group)
    expanded = weight.dequantize(torch.bfloat16)
    copies = max(1, CACHE_BYTES // expanded.nbytes)
    packed = [packed_linear(weight, None, torch.bfloat16, CPU) for _ in range(copies)]
    plain = [Linear(expanded.clone(), None) for _ in range(copies)]
    for layer in plain:
        layer.finish()
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    results = []
    for count in rows:
        x = torch.randn(count, inputs).bfloat16()
        used = max(1, min(copies, (1 << 33) // (count * outputs * inputs)))
        sides = packed[:used], plain[:used]
        for side in sides:  # oneDNN makes its kernels in the first call
            seconds(side, x, clock)
        ratios, best = [], float("inf")
        for number in range(rounds):
            order = (0, 1) if number % 2 == 0 else (1, 0)
            spent = {side: seconds(sides[side], x, clock) for side in order}
            ratios.append(spent[0] / spent[1])
            best = min(best, spent[0])
        size = sum(weight_bytes(packed[:1]).values())
        result = Result(*shape, count, size, expanded.nbytes, ratios, best)
        print(result.line(), flush=True)
        results.append(result)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rows", default="1,4,16,64,256", help="separated by commas")
    parser.add_argument("--group", type=int, default=32, help="inputs that share a scale")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = [int(count) for count in options.rows.split(",")]
    results = [r for shape in SHAPES for r in measure(shape, rows, options.rounds, options.group)]
    if options.json:
        record = {"argv": sys.argv[1:], "results": [asdict(result) for result in results]}
        options.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
