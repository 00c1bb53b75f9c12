"""Packed linear layers beside the bfloat16 layer of the engine, in one interleaved run.

    python benchmarks/packed_linear.py [--device cuda] [--rows 1,4,16,64,256] [--threads 1]

For each shape and number of rows: time of the packed layer over time of the engine's `Linear` with
the same weights expanded, the median of the rounds and their range, and the bytes that it holds
over those; and its time over that of PyTorch's 4-bit layer with the same weights, a peer, where
that takes them. Each side goes through several copies of the layer, more than caches hold, as a
model goes through its layers. On a GPU, the default where there is one, that is a CUDA graph. On a
CPU with one thread processor time is taken, which other work on the machine disturbs less, and
otherwise the time of a clock.
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

from pageloom.engine.memory_report import weight_bytes
from pageloom.ops.linear import Linear
from pageloom_quant.packed import PackedWeight, packed_linear

SHAPES = (  # outputs, inputs, bits
    (960, 576, 4),  # SmolLM2-135M: q, k and v
    (576, 1536, 4),  # its down projection
    (49152, 576, 8),  # its output layer
    (4096, 14336, 4),  # Llama-3-8B: its down projection
)
CACHE_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}
MOST_PRODUCTS = {"cpu": 1 << 33, "cuda": 1 << 42}  # of a pass


@dataclass
class Result:
    outputs: int
    inputs: int
    bits: int
    rows: int
    packed_bytes: int
    plain_bytes: int
    ratios: list[float]  # of times, packed over plain, one per round
    peer_ratios: list[float] | None  # packed over PyTorch's 4-bit layer
    seconds: float  # of the packed layer, the least

    def line(self) -> str:
        times = f"time {spread(self.ratios)} of bfloat16's"
        if self.peer_ratios is not None:
            times += f", {spread(self.peer_ratios)} of PyTorch's int4pack_mm's"
        return (
            f"{self.outputs:>6} x {self.inputs:<6} {self.bits} bits {self.rows:>5} rows: {times}, "
            f"{self.seconds * 1e6:,.1f} us; memory {self.packed_bytes / self.plain_bytes:.3f}"
        )


def spread(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def random_weight(outputs: int, inputs: int, bits: int, group: int) -> PackedWeight:
    codes = torch.randint(256, (outputs, inputs * bits // 8), dtype=torch.uint8)
    scales = (torch.rand(outputs, inputs // group) + 0.5) / (1 << bits) / inputs**0.5
    # Formats of 4 bits mostly have zero points of their own, those of 8 bits do not.
    zeros = torch.full_like(scales, 128) if bits == 8 else torch.rand_like(scales) * 15
    scales = scales.half()
    return PackedWeight(codes, scales, (scales.float() * -zeros).half(), group, bits)


def peer_linear(weight: PackedWeight, device: torch.device) -> Callable | None:
    """PyTorch's own layer of 4 bits in bfloat16; None if it has none for this weight. Its scales
    and zero points are rounded to bfloat16."""
    group, inputs = weight.group_size, weight.in_features
    if weight.bits != 4 or group not in (32, 64, 128, 256):
        return None
    codes = weight.unpacked_codes().to(device, torch.int32)
    middles = weight.minimums.float() + 8 * weight.scales.float()
    table = torch.stack([weight.scales.float(), middles], dim=-1).transpose(0, 1)
    table = table.to(device, torch.bfloat16).contiguous()
    if device.type == "cpu":
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        return lambda x: torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, group, table)
    pairs = (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8)
    tiles = next(count for count in (8, 4, 2) if inputs % (16 * count) == 0)
    packed = torch.ops.aten._convert_weight_to_int4pack(pairs, tiles)
    return lambda x: torch.ops.aten._weight_int4pack_mm(x, packed, group, table)


Pass = Callable[[], object]


def passing(layers: Sequence[Callable], x: torch.Tensor) -> Pass:
    """What puts ``x`` through every layer; on a GPU as a CUDA graph, as an engine would."""

    def run() -> None:
        for layer in layers:
            layer(x)

    run()  # oneDNN and Triton make their kernels in the first call
    if x.device.type == "cpu":
        return run
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def spent(run: Pass, device: torch.device) -> float:
    """Seconds."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    before = clock()
    run()
    return clock() - before


@torch.inference_mode()
def measure(
    shape: tuple[int, int, int], rows: Sequence[int], options: argparse.Namespace
) -> list[Result]:
    outputs, inputs, _ = shape
    device = torch.device(options.device)
    weight = random_weight(*shape, options.group)
    expanded = weight.dequantize(torch.bfloat16).to(device)
    # The smallest of the sides, a quarter of the bytes, must not fit either.
    copies = max(1, CACHE_BYTES[device.type] // expanded.nbytes)
    packed = [packed_linear(weight, None, torch.bfloat16, device) for _ in range(copies)]
    plain = [Linear(expanded.clone(), None) for _ in range(copies)]
    for layer in plain:
        layer.finish()
    peer = [peer_linear(weight, device) for _ in range(copies)]
    results = []
    for count in rows:
        x = torch.randn(count, inputs).to(device, torch.bfloat16)
        used = max(1, min(copies, MOST_PRODUCTS[device.type] // (count * outputs * inputs)))
        layers = {"packed": packed[:used], "plain": plain[:used]}
        if peer[0] is not None:
            torch.testing.assert_close(peer[0](x), packed[0](x), atol=0.05, rtol=0.05)
            layers["peer"] = peer[:used]
        sides = {name: passing(some, x) for name, some in layers.items()}
        times: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(options.rounds):
            for name in list(sides)[:: 1 if number % 2 == 0 else -1]:
                times[name].append(spent(sides[name], device) / used)
        ratios = {
            name: [a / b for a, b in zip(times["packed"], other, strict=True)]
            for name, other in times.items()
        }
        size = sum(weight_bytes(packed[:1]).values())
        best = min(times["packed"])
        found = ratios["plain"], ratios.get("peer"), best
        results.append(Result(*shape, count, size, expanded.nbytes, *found))
        print(results[-1].line(), flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rows", default="1,4,16,64,256", help="separated by commas")
    parser.add_argument("--group", type=int, default=32, help="inputs that share a scale")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU: leave out --device, or give cpu")
    torch.set_num_threads(options.threads)
    rows = [int(count) for count in options.rows.split(",")]
    results = [r for shape in SHAPES for r in measure(shape, rows, options)]
    if options.json:
        record = {"argv": sys.argv[1:], "results": [asdict(result) for result in results]}
        options.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
