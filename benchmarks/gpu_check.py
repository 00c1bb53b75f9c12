"""All that needs a GPU, in one go: is it right there, and how fast?

    python benchmarks/gpu_check.py [--json FILE]

Five parts, each in processes of its own, so that one that crashes leaves the others their GPU:

- ``rates``: read and copy bandwidth, and matrix rates;
- ``suite``: the conformance suite, on the device, for every backend that accepts it, and the other
  tests that need a GPU: of fused operations, CUDA graphs and packed linear layers;
- ``table``: those backends beside PyTorch's `scaled_dot_product_attention` and FlexAttention on
  contiguous keys and values, by ``pageloom bench attention``;
- ``engine``: tokens per second of a whole engine with random weights of Llama 3 8B's shape, by
  ``pageloom bench engine``; on a GPU with CUDA graphs and without, in turn;
- ``packed``: packed linear layers beside those of bfloat16, by ``packed_linear.py``.

Without a GPU, only the parts that say something about a CPU run (``--parts`` asks for others, which
takes a smaller ``--model``), and the output says so. The results go to ``--json``, or to
``gpu_check.json`` in the folder that the variable OUT names. Exits with 1 if a part failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TextIO

import torch

from pageloom.bench.attention.rates import Rates
from pageloom.bench.machine import Machine, load_average
from pageloom.contract import AttentionSpec, LayerSpec
from pageloom.plugins import PluginError, Plugins

PARTS = ("rates", "suite", "table", "engine", "packed")
CPU_PARTS = ("rates", "table")
ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs" / "bench"
CORE_TESTS = (
    "tests/ops",
    "tests/runner",
    "tests/plugins/quant/test_packed_triton.py",
    # Not the suite again, which is in the same file.
    "tests/plugins/attention/triton/test_triton_gpu.py::"
    "test_a_graph_of_a_decode_step_serves_steps_with_longer_contexts",
)
OUTCOMES = re.compile(r" (PASSED|FAILED|ERROR|SKIPPED)\b")

LLAMA_3_8B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "eos_token_id": 128001,
    "dtype": "bfloat16",
}
SUITE = """\
from pageloom.testing import AttentionSuite

class TestOnDevice(AttentionSuite):
    backend = {backend!r}
    device = {device!r}
    scale = {scale!r}
"""


class PartError(Exception):
    """A part could not be carried out."""


def measure_rates(options: argparse.Namespace, folder: Path) -> dict:
    """Per second."""
    device = torch.device(options.device)
    rates = Rates(device)
    of = {"read_bytes": rates.read, "copy_bytes": rates.copy}
    of |= {f"flop_{dtype}": rates.matrix(dtype) for dtype in ("float32", "bfloat16")}
    found = {name: median(rate.measure(device) for _ in range(5)) for name, rate in of.items()}
    for name, rate in found.items():
        print(f"{name:>15}: {rate / 1e9:,.1f} G/s")
    return found


def run_suite(options: argparse.Namespace, folder: Path) -> dict:
    """Counts of tests by outcome, by backend and of the core. All at once: nothing is timed."""
    plugins, running, found = Plugins.load(), {}, {}
    running["core"] = start_tests(folder / "core.log", ROOT, ["-m", "gpu", *CORE_TESTS])
    layer = LayerSpec(32, 8, 128, scale=128**-0.5)
    for name in plugins.names("attention_backend"):
        try:
            backend = plugins.get("attention_backend", name)
            size = backend.block_size(None, 1024)
            spec = AttentionSpec(torch.device(options.device), torch.bfloat16, (layer,), size, 1024)
            reason = backend.check(spec)
        except PluginError as error:
            reason = error.reason
        if reason is not None:
            found[name] = {"refused": reason}
            continue
        file = folder / f"test_{name.replace('.', '_').replace('-', '_')}.py"
        file.write_text(SUITE.format(backend=name, device=options.device, scale=options.scale))
        alone = [file.name, "-c", os.devnull, "--rootdir", str(folder)]
        running[name] = start_tests(file.with_suffix(".log"), folder, alone)
    end = time.monotonic() + options.suite_seconds
    for name, (log, process) in running.items():
        late = False
        try:
            process.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            late = True
            process.kill()
            process.wait()
        log.seek(0)
        text = log.read()
        log.close()
        crashed = not late and process.returncode not in (0, 1)
        found[name] = {**count_outcomes(text), "out_of_time": late, "crashed": crashed}
        if process.returncode:
            found[name]["output"] = text[-4000:]
    for name, result in found.items():
        print(f"{name}: " + ", ".join(f"{k} {v}" for k, v in result.items() if k != "output"))
    if all("refused" in result for name, result in found.items() if name != "core"):
        raise PartError(f"no attention backend accepts {options.device}: {found}")
    return found


def start_tests(
    log: Path, folder: Path, arguments: Sequence[str]
) -> tuple[TextIO, subprocess.Popen]:
    command = [sys.executable, "-m", "pytest", "-v", "--color=no", "-rf", "-p", "no:cacheprovider"]
    file = log.open("w+")
    return file, subprocess.Popen([*command, *arguments], cwd=folder, stdout=file, stderr=file)


def count_outcomes(told: str) -> dict[str, int]:
    """Of what ``pytest -v -rf`` printed."""
    counts = Counter(OUTCOMES.findall(told.split("short test summary")[0]))
    return {name.lower(): counts[name] for name in ("PASSED", "SKIPPED", "FAILED", "ERROR")}


def make_table(options: argparse.Namespace, folder: Path) -> dict:
    """What ``pageloom bench attention --json`` writes."""
    matrix = options.matrix
    if matrix is None:
        on_gpu = options.device != "cpu"
        matrix = CONFIGS / ("attention-gpu-check.yaml" if on_gpu else "attention.yaml")
    file = folder / "table.json"
    pageloom("attention", matrix, "--set", f"device={options.device}", "--json", file)
    return json.loads(file.read_text())


def complaints(part: str, found: dict) -> list[str]:
    """What is wrong with what a part found."""
    if part == "table":
        return [f"{one['backend']} {one['reason']}" for one in found["pageloom"]["failed"]]
    if part == "suite":
        return [
            f"{name} does not pass"
            for name, result in found.items()
            if result.get("failed") or result.get("error") or result.get("crashed")
        ]
    return []


def run_engine(options: argparse.Namespace, folder: Path) -> dict:
    """What ``pageloom bench engine --json`` writes, less the single requests."""
    model = options.model
    if model is None:
        model = folder
        (folder / "config.json").write_text(json.dumps(LLAMA_3_8B))
    shared: dict = {"model": {"path": str(model), "loader": "dummy"}}
    runtimes = {"engine": {"device": options.device}}
    if options.device != "cpu":
        runtimes["eager"] = {"device": options.device, "enforce_eager": True}
        shared["kv_cache"] = {"memory": options.kv_memory}  # both are in memory at the same time
    for name, runtime in runtimes.items():
        config = shared | {"runtime": runtime}
        (folder / f"{name}.yaml").write_text(json.dumps(config))  # JSON is YAML
    configs = [folder / f"{name}.yaml" for name in runtimes]
    file = folder / "engine.json"
    amount = ["--rounds", options.rounds, "--requests", options.requests, "--json", file]
    lengths = ["--prompt-tokens", options.prompt_tokens, "--output-tokens", options.output_tokens]
    pageloom("engine", *configs, *amount, *lengths)
    found = json.loads(file.read_text())
    return {key: found[key] for key in ("machine", "configs", "summary")}


def compare_packed(options: argparse.Namespace, folder: Path) -> dict:
    """What ``packed_linear.py --json`` writes."""
    file, script = folder / "packed.json", Path(__file__).with_name("packed_linear.py")
    command = [sys.executable, str(script), "--device", options.device, "--json", str(file)]
    if code := subprocess.run(command).returncode:
        raise PartError(f"{script.name} ended with exit code {code}")
    return json.loads(file.read_text())


def pageloom(*arguments: object) -> None:
    command = [sys.executable, "-m", "pageloom", "bench", *map(str, arguments)]
    code = subprocess.run(command).returncode
    if code not in (0, 1):  # 1 is a complaint, with the results written
        raise PartError(f"{' '.join(command[2:])} ended with exit code {code}")


PART_FUNCTIONS = (measure_rates, run_suite, make_table, run_engine, compare_packed)
RUN = dict(zip(PARTS, PART_FUNCTIONS, strict=True))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--parts", help=f"some of {','.join(PARTS)}; default: all on a GPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--scale", choices=("full", "small"), default="full", help="of the suite")
    parser.add_argument("--suite-seconds", type=float, default=60, help="then it is stopped")
    parser.add_argument("--matrix", type=Path, help="of the table, instead of one in configs/bench")
    parser.add_argument("--model", type=Path, help="folder with a config.json, for the engine")
    parser.add_argument("--kv-memory", default="8GiB", help="of each engine on a GPU")
    parser.add_argument("--rounds", type=int, default=2, help="to the engine")
    parser.add_argument("--requests", type=int, default=128, help="to the engine")
    parser.add_argument("--prompt-tokens", default="50:500", metavar="LEAST:MOST")
    parser.add_argument("--output-tokens", default="64:128", metavar="LEAST:MOST")
    options = parser.parse_args(arguments)
    if options.json is None and os.environ.get("OUT"):
        options.json = Path(os.environ["OUT"]) / "gpu_check.json"
    default = CPU_PARTS if options.device == "cpu" else PARTS
    options.parts = options.parts.split(",") if options.parts else default
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"--parts: {', '.join(sorted(unknown))}: there are {', '.join(PARTS)}")
    if options.device == "cpu" and "engine" in options.parts and options.model is None:
        parser.error("the engine's default model is too large for a CPU; name a smaller --model")
    return options


def main(arguments: list[str] | None = None) -> int:
    options, load = parse(arguments), load_average()
    why_not = "there is no GPU" if options.device == "cpu" else "not asked for"
    skipped = {part: why_not for part in PARTS if part not in options.parts}
    report: dict = {"device": options.device, "seconds": {}, "skipped": skipped, "failed": {}}
    for part, reason in skipped.items():
        print(f"== {part}: skipped, {reason}", flush=True)
    for part in options.parts:
        print(f"== {part}", flush=True)
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            try:
                report[part] = RUN[part](options, Path(folder))
                if wrong := complaints(part, report[part]):
                    report["failed"][part] = "; ".join(wrong)
            except Exception as error:
                report["failed"][part] = f"{type(error).__name__}: {error}"
        report["seconds"][part] = time.monotonic() - start
        if options.json is not None:  # after each part: the machine may be taken away
            report["machine"] = asdict(Machine.describe(load))
            options.json.write_text(json.dumps(report, indent=1))
    for part, seconds in report["seconds"].items():
        print(f"{part}: {report['failed'].get(part, 'done')}, {seconds:.0f} s")
    return 1 if report["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
