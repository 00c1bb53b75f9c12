"""The packages in examples/, installed by pip into an environment of their own: found, proven, run
and measured, without a change to this repository."""

from __future__ import annotations

import json
import os
import shutil
import site
import subprocess
import sys
from pathlib import Path

import pytest

from tiny_model import write_model

ROOT = Path(__file__).parent.parent
PACKAGES = ("pageloom-example-attention", "pageloom-example-kvformat", "pageloom-peers")

GENERATE = """
import json, sys
from pageloom import Engine, SamplingParams

prompts = [[5, 6, 7], list(range(1, 40)), [9] * 20]
tokens = {}
for backend in sys.argv[2:]:
    engine = Engine.from_config(sys.argv[1], [f"attention.backend={backend}"])
    outputs = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=12))
    tokens[backend] = [output.outputs[0].token_ids for output in outputs]
print(json.dumps(tokens))
"""

FORMATS = """
import json, sys
from pageloom import Engine, SamplingParams

def engine(name, dtype):
    settings = [f"kv_cache.quantizer={name}", f"model.dtype={dtype}"]
    return Engine.from_config(sys.argv[1], settings)

plain, coded = (engine(name, "bfloat16").info for name in ("null", "rotated4"))
params = SamplingParams(temperature=0, max_tokens=12)
prompts = [[5, 6, 7], list(range(1, 40)), [9] * 20]
answering = engine("rotated4", "float32")
together = [output.outputs[0].token_ids for output in answering.generate(prompts, params)]
alone = [answering.generate([prompt], params)[0].outputs[0].token_ids for prompt in prompts]
print(json.dumps({
    "bytes_per_block": [plain.bytes_per_block, coded.bytes_per_block],
    "num_blocks": [plain.num_blocks, coded.num_blocks],
    "block_size": [plain.block_size, coded.block_size],
    "together": together,
    "alone": alone,
}))
"""

MATRIX = """
device: cpu
rounds: 2
kv_memory: 4MiB
shapes: {tiny: {num_heads: 4, num_kv_heads: 2, head_size: 64, layers: 2}}
cases:
  - {phase: decode, batch: [4], context: [64], dtype: [float32]}
"""


class Environment:
    """A virtual environment that sees the packages of this one, and in which ours are installed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
        self.python = folder / "venv" / "bin" / "python"
        (packages,) = (folder / "venv").glob("lib/python*/site-packages")
        lines = [f"import site; site.addsitedir({path!r})" for path in site.getsitepackages()]
        (packages / "parent.pth").write_text("\n".join(lines))

    def install(self, package: str) -> None:
        # Building leaves files beside the source.
        source = shutil.copytree(ROOT / "examples" / package, self.folder / package)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", self.python]
        offline = ["--no-index", "--no-deps", "--no-build-isolation", "--quiet"]
        done = subprocess.run(
            [*pip, "install", *offline, source], capture_output=True, text=True, timeout=1200
        )
        assert done.returncode == 0, done.stderr

    def run(self, *arguments: str | Path, folder: str = ".") -> str:
        done = subprocess.run(
            [self.python, *arguments],
            capture_output=True,
            text=True,
            cwd=self.folder / folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            timeout=1200,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    made = Environment(tmp_path_factory.mktemp("examples"))
    for package in PACKAGES:
        made.install(package)
    return made


def test_they_are_listed_like_any_other_plugin(environment):
    listed = json.loads(environment.run("-m", "pageloom", "plugins", "--json"))
    assert listed["failures"] == []
    found = {entry["name"]: entry for entry in listed["components"]}
    assert found["blockwise"]["package"] == "pageloom-example-attention"
    assert found["blockwise"]["kind"] == "attention_backend"
    assert found["blockwise"]["available"]
    assert found["rotated4"]["package"] == "pageloom-example-kvformat"
    assert found["rotated4"]["kind"] == "kv_quantizer"
    for name in ("flash_attn", "flashinfer"):
        assert found[name]["package"] == "pageloom-peers"
        assert found[name]["available"] or "needs" in found[name]["reason"]
    assert found["torch_paged"]["package"] == "pageloom"


@pytest.mark.parametrize("package", PACKAGES)
def test_they_pass_their_own_tests(environment, package):
    output = environment.run("-m", "pytest", "-q", "-p", "no:cacheprovider", folder=package)
    assert " passed" in output
    assert " failed" not in output


def test_an_engine_answers_with_the_new_backend_as_with_the_old(environment):
    write_model(environment.folder)
    path = environment.folder / "engine.yaml"
    path.write_text(
        f"model: {{path: {environment.folder}, loader: dummy, dtype: float32,"
        " options: {initializer_range: 0.5}}\n"
        "kv_cache: {num_blocks: 40}\n"
        "runtime: {device: cpu, debug: true}\n"
    )
    tokens = json.loads(environment.run("-c", GENERATE, path, "blockwise", "torch_paged"))
    assert tokens["blockwise"] == tokens["torch_paged"]
    assert all(len(each) > 1 for each in tokens["blockwise"])


def test_an_engine_stores_by_the_new_format_and_holds_all_that_it_saves(environment):
    folder = environment.folder / "wide"
    folder.mkdir()
    write_model(folder, hidden_size=256, num_attention_heads=2, num_key_value_heads=1)
    path = folder / "engine.yaml"
    path.write_text(
        f"model: {{path: {folder}, loader: dummy,"
        " options: {initializer_range: 0.5}}\n"
        "attention: {backend: torch_paged}\n"
        "kv_cache: {memory: 4MiB, block_size: 16}\n"
        "runtime: {device: cpu, debug: true}\n"
    )
    said = json.loads(environment.run("-c", FORMATS, path))
    vectors = 2 * 2 * 16  # in a block: K and V of 16 tokens in each of two layers with one head
    assert said["block_size"] == [16, 16]
    assert said["bytes_per_block"] == [vectors * 256, vectors * 68]
    plain, coded = said["num_blocks"]
    assert [plain, coded] == [2**22 // size for size in said["bytes_per_block"]]
    assert coded >= 3.76 * plain
    assert said["together"] == said["alone"]
    assert all(len(each) > 1 for each in said["together"])


def test_the_new_backend_stands_in_the_table(environment):
    matrix = environment.folder / "matrix.yaml"
    matrix.write_text(MATRIX)
    table = environment.run("-m", "pageloom", "bench", "attention", matrix)
    timed, refused = table.split("Not timed:", 1)
    assert "torch_paged" in timed
    assert "blockwise" in timed
    for name in ("flash_attn", "flashinfer"):
        assert f"{name} " in refused
