"""What `CPUPaged` promises beyond the contract, and its kernels on other CPUs."""

from __future__ import annotations

import itertools
import logging
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from pageloom.config import load_config
from pageloom.contract import AttentionBatch, AttentionSpec, LayerSpec, native
from pageloom.engine.backend_choice import choose_backend
from pageloom.plugins import Plugins
from pageloom_attention.cpu_paged import FLAGS, SOURCE, CPUPaged

CHECK = Path(__file__).with_name("cpu_paged_check.cpp")
needs_compiler = pytest.mark.skipif(
    native.find_compiler() is None, reason="there is no C++ compiler"
)
plugins = Plugins.load()
ELEMENTS = ("fp8_e4m3", "fp8_e5m2", "int8", "int4")
FORMATS = [*ELEMENTS, *(f"{element}_token_head" for element in ELEMENTS)]
SPEC = AttentionSpec(
    device=torch.device("cpu"),
    dtype=torch.float32,
    layers=(LayerSpec(num_heads=6, num_kv_heads=2, head_size=80, scale=0.1, sinks=True),),
    block_size=16,
    max_model_len=8192,
)


@dataclass(frozen=True)
class Sequence:
    seed: int
    old: int  # tokens of an earlier step
    new: int  # tokens of the step that is looked at

    def draw(self, spec: AttentionSpec) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v of all tokens: ``[old + new, heads, head_size]``."""
        layer, generator = spec.layers[0], torch.Generator().manual_seed(self.seed)
        heads = (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
        q, k, v = (
            torch.randn(self.old + self.new, n, layer.head_size, generator=generator).to(spec.dtype)
            for n in heads
        )
        return q, k, v


def coded(name: str, spec: AttentionSpec = SPEC) -> AttentionSpec:
    """``spec`` in a KV format."""
    layout = plugins.get("kv_quantizer", name).layout
    return replace(spec, quantizer=name, layout=layout)


def make(spec: AttentionSpec, **options: float) -> CPUPaged:
    """``options`` are those of the KV format."""
    if spec.quantizer is None:
        return CPUPaged(None, spec, None)
    quantizer = plugins.get("kv_quantizer", spec.quantizer)
    return CPUPaged(None, spec, quantizer(quantizer.Config(**options)))


def attend(
    sequences: list[Sequence], spec: AttentionSpec = SPEC, threads: int = 1
) -> list[torch.Tensor]:
    """The output of each sequence's new tokens, all of them in one step."""
    size, drawn = spec.block_size, [sequence.draw(spec) for sequence in sequences]
    counts = [-(-(s.old + s.new) // size) for s in sequences]
    backend = make(spec)
    backend.allocate(sum(counts))
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0))
    tables = order.int().split(counts)
    sinks = torch.linspace(-1, 1, spec.layers[0].num_heads) if spec.layers[0].sinks else None
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        out = torch.empty(0)
        for spans in ([(0, s.old) for s in sequences], [(s.old, s.old + s.new) for s in sequences]):
            backend.plan(batch(tables, spans, size))
            q, k, v = (
                torch.cat([x[start:end] for x, (start, end) in zip(parts, spans, strict=True)])
                for parts in zip(*drawn, strict=True)
            )
            out = torch.full_like(q, torch.nan)
            backend.forward(0, q, k, v, out, sinks)
    finally:
        torch.set_num_threads(before)
    return list(out.split([s.new for s in sequences]))


def batch(
    tables: tuple[torch.Tensor, ...], spans: list[tuple[int, int]], size: int
) -> AttentionBatch:
    counts = [end - start for start, end in spans]
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    lengths = torch.tensor([end for _, end in spans], dtype=torch.int32)
    positions = [torch.arange(*span) for span in spans]
    slots = [
        table[at // size].long() * size + at % size
        for table, at in zip(tables, positions, strict=True)
    ]
    return AttentionBatch(
        query_start=starts,
        seq_lens=lengths,
        block_tables=torch.nn.utils.rnn.pad_sequence(list(tables), batch_first=True),
        slots=torch.cat(slots),
        query_start_host=starts,
        seq_lens_host=lengths,
        num_decodes=sum(n == 1 for n in counts),
        max_query_len=max(counts),
        max_seq_len=int(lengths.max()),
    )


MIXED = [
    Sequence(1, 1700, 1),
    Sequence(2, 5, 1),
    Sequence(3, 513, 1),
    Sequence(4, 4090, 40),  # more than one split, and two query tiles
    Sequence(5, 30, 300),
    Sequence(6, 1, 7),
]


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 700])
def test_neither_threads_nor_neighbours_change_a_bit(dtype, window):
    layer = replace(SPEC.layers[0], window=window)
    spec = replace(SPEC, dtype=dtype, layers=(layer,))
    together = attend(MIXED, spec)
    for threads in (2, 5):
        assert all(map(torch.equal, together, attend(MIXED, spec, threads)))
    for sequence, output in zip(MIXED, together, strict=True):
        assert output.isfinite().all()
        (alone,) = attend([sequence], spec)
        assert torch.equal(output, alone)


@needs_compiler
def test_block_sizes_change_nothing():
    """Blocks that cut tiles are gathered; the arithmetic is the same."""
    expected = attend(MIXED)
    for size in (1, 24, 32, 5000):
        assert all(map(torch.equal, expected, attend(MIXED, replace(SPEC, block_size=size))))


@needs_compiler
@pytest.mark.parametrize("quantizer", FORMATS)
def test_neither_do_they_in_a_kv_format(quantizer):
    """Nor do block sizes, threads and neighbours."""
    spec = coded(quantizer, replace(SPEC, dtype=torch.bfloat16))
    expected = attend(MIXED, spec)
    assert all(output.isfinite().all() for output in expected)
    assert all(map(torch.equal, expected, attend(MIXED, replace(spec, block_size=24), threads=2)))
    for sequence, output in zip(MIXED[2:4], expected[2:4], strict=True):
        assert torch.equal(output, *attend([sequence], spec))


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("quantizer", FORMATS)
def test_codes_are_those_of_the_format(quantizer, dtype):
    """A sequence's first token attends to itself alone, so it gets its V as that is read back."""
    layer, spec = SPEC.layers[0], coded(quantizer, replace(SPEC, dtype=dtype))
    options = {} if quantizer.endswith("token_head") else {"k_scale": 0.7, "v_scale": 0.0231}
    backend = make(spec, **options)
    v = hard_to_code((layer.num_kv_heads, layer.head_size), 0.0231).to(dtype)
    count = len(v)
    backend.allocate(count)
    backend.plan(batch(torch.arange(count).int().split(1), [(0, 1)] * count, spec.block_size))
    out = torch.empty(count, layer.num_heads, layer.head_size, dtype=dtype)
    backend.forward(0, torch.zeros_like(out), torch.zeros_like(v), v, out)
    assert backend.quantizer is not None
    data = backend.quantizer.encode(v, 0, "v")
    expected = backend.quantizer.decode(data, 0, "v", dtype)
    expected = expected.repeat_interleave(layer.num_heads // layer.num_kv_heads, dim=1)
    tolerance = max(2 * torch.finfo(dtype).eps, 1e-6)
    least = float(torch.finfo(dtype).smallest_normal)
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=least, equal_nan=True)


def hard_to_code(shape: tuple[int, int], scale: float) -> torch.Tensor:
    """Vectors of many magnitudes, of ties between two codes and next to them, with NaN, with
    infinities, and of zeros."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, *shape, generator=generator)
    x[:16] *= 10 ** torch.linspace(-8, 4, 16).view(-1, 1, 1)
    ties = torch.randint(-300, 300, (32, *shape), generator=generator) / 2 * scale
    x[16:48] = ties * (1 + torch.randint(-1, 2, ties.shape, generator=generator) * 2**-23)
    x[48, 0, 5] = torch.nan
    x[49, 1, :2] = torch.tensor([torch.inf, -torch.inf])
    x[50] = 0
    return x


@needs_compiler
@pytest.mark.parametrize("quantizer", FORMATS)
def test_a_block_takes_what_the_format_says(quantizer):
    spec = coded(quantizer)
    vector = spec.layout.bytes_per_vector(80)
    assert make(spec).bytes_per_block() == 2 * 2 * 16 * vector


@needs_compiler
@pytest.mark.parametrize(
    ("head_size", "dtype", "stored"),
    [(64, torch.bfloat16, 64), (33, torch.float32, 48), (80, torch.float16, 80)],
)
def test_a_block_takes_whole_vectors(head_size, dtype, stored):
    layer = replace(SPEC.layers[0], head_size=head_size)
    backend = CPUPaged(None, replace(SPEC, dtype=dtype, layers=(layer, layer)), None)
    assert backend.bytes_per_block() == 2 * 2 * 16 * 2 * stored * dtype.itemsize


def test_refuses_what_it_cannot_do():
    assert CPUPaged.check(replace(SPEC, device=torch.device("meta"))) == (
        "runs on a CPU, not on meta"
    )
    assert "not torch.float64" in CPUPaged.check(replace(SPEC, dtype=torch.float64))
    assert CPUPaged.check(replace(SPEC, quantizer="mine")) == (
        "does not know how the KV format mine lays out a vector; torch_paged runs every KV format"
    )


def taken_over(caplog, tmp_path):
    """The line that says why ``auto`` takes ``torch_paged``."""
    plugins = Plugins.load()
    (tmp_path / "engine.yaml").write_text("model: {path: unused}\n")
    config = load_config(tmp_path / "engine.yaml", [], plugins)
    with caplog.at_level(logging.WARNING):
        name, _ = choose_backend(config, plugins, SPEC, None)
    assert name == "torch_paged"
    (line,) = [m for m in caplog.messages if "cpu_paged" in m]
    return line


def test_without_a_compiler_torch_paged_takes_over(monkeypatch, caplog, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert taken_over(caplog, tmp_path) == (
        "attention backend cpu_paged needs a C++ compiler (c++, or the one that CXX names); "
        "torch_paged takes over"
    )


def test_with_a_compiler_that_fails_torch_paged_takes_over(monkeypatch, caplog, tmp_path):
    broken = tmp_path / "broken-compiler"
    broken.write_text(
        "#!/bin/sh\necho 'x.cpp: what follows'\necho 'x.cpp:1: error: no' >&2\nexit 1\n"
    )
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    assert taken_over(caplog, tmp_path) == (
        "attention backend cpu_paged cannot be compiled: x.cpp:1: error: no; torch_paged takes over"
    )


@needs_compiler
def test_where_nothing_can_be_kept_torch_paged_takes_over(monkeypatch, caplog, tmp_path):
    (tmp_path / "a file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a file"))
    assert taken_over(caplog, tmp_path).startswith(
        "attention backend cpu_paged cannot be compiled: set XDG_CACHE_HOME to a folder that can be"
    )


# Everything again for CPUs with less than this one, down to one with no vectors of note.
TARGETS = {
    "this CPU": [],
    "no AVX512-FP16": ["-mno-avx512fp16"],
    "no AVX512-BF16": ["-mno-avx512bf16", "-mno-avx512fp16"],
    "AVX2": ["-mno-avx512f"],
    "SSE2": ["-mno-avx"],
    "sanitized": [
        *("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover"),
        # Address finds the same, and compiling takes a third less without them.
        "-fno-sanitize=null,object-size,pointer-overflow",
    ],
}
IS_X86 = platform.machine() in ("x86_64", "AMD64")


def macros(flags: list[str]) -> str:
    """What the compiler defines itself, by which the code chooses."""
    command = [*native.find_compiler(), native.THIS_CPU, *flags, "-x", "c++", "-dM", "-E"]
    return subprocess.run([*command, os.devnull], capture_output=True, text=True).stdout


def compile_check(compiler: list[str], flags: list[str], folder: Path) -> Path:
    program = folder / "check"
    command = [*compiler, "-std=c++17", "-O2", "-w", "-fopenmp", *FLAGS, *flags]
    command += [f"-I{SOURCE.parent}", str(CHECK), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and any(word in done.stderr for word in ("-lasan", "-lubsan", "libasan")):
        pytest.skip("this compiler has no sanitizers")
    assert done.returncode == 0, done.stderr
    return program


@needs_compiler
@pytest.mark.parametrize("target", TARGETS)
def test_the_kernels_are_right_on_lesser_cpus(target, tmp_path):
    if any(flag.startswith("-mno") for flag in TARGETS[target]) and not IS_X86:
        pytest.skip("the flags are those of x86")
    found = macros(TARGETS[target])
    for earlier in itertools.takewhile(lambda name: name != target, TARGETS):
        if found and macros(TARGETS[earlier]) == found:
            pytest.skip(f"is compiled here like {earlier!r}")
    flags = [native.THIS_CPU, *TARGETS[target]]
    program = compile_check(native.find_compiler(), flags, tmp_path)
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("features", ["armv8-a", "armv8.2-a+bf16"])
def test_the_kernels_are_right_on_arm(features, tmp_path):
    compiler, emulator = "aarch64-linux-gnu-g++", shutil.which("qemu-aarch64")
    if not (shutil.which(compiler) and emulator):
        pytest.skip("needs g++-aarch64-linux-gnu and qemu-user")
    program = compile_check([compiler], [f"-march={features}", "-static"], tmp_path)
    done = subprocess.run(
        [emulator, "-cpu", "max", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
