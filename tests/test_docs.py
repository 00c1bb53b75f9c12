"""What the README and the contract show does work."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import pageloom.contract.executor
import pageloom.contract.loader
import pageloom.contract.quantizer
import pageloom.contract.scheduler
import pageloom.contract.tools
import pageloom.testing.executor_suite
from pageloom.contract import Scheduler
from simulation import make_request, simulate

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def snippets(containing):
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    return [block for block in blocks if containing in block]


def example_of(module, prefix="pageloom_"):
    """The Python file in the docstring of a module."""
    pattern = rf"^``{prefix}\w+\.py``::\n\n(.*?)^Then"
    text = re.search(pattern, module.__doc__, re.DOTALL | re.M)
    return textwrap.dedent(text[1])


def execute(source):
    namespace = {"__name__": "example"}
    exec(compile(source, "example", "exec"), namespace)
    return namespace


def subclass_in(namespace, base):
    return next(
        value
        for value in namespace.values()
        if isinstance(value, type) and issubclass(value, base) and value is not base
    )


@pytest.mark.parametrize(
    "source",
    [*snippets("class ShortestFirst"), example_of(pageloom.contract.scheduler)],
    ids=["README", "contract"],
)
def test_the_scheduler_examples_serve_everybody(source):
    namespace = execute(source)
    policy = subclass_in(namespace, Scheduler)
    registered = {}
    namespace["register_schedulers"](registered.__setitem__)
    assert [target.split(":")[1] for target in registered.values()] == [policy.__name__]
    sim = simulate(policy(policy.Config()), num_blocks=17, max_num_batched_tokens=9)
    requests = [make_request(n, 1 + 7 * n % 30, 1 + 5 * n % 30, n) for n in range(60)]
    preempted = sum(len(plan.preempted) for plan, _ in sim.drive(requests))
    assert preempted > 0
    assert sim.planner.pool.num_used == 0


def test_the_quantizer_example_is_a_format():
    import torch

    from pageloom.contract import KVQuantizer

    quantizer = subclass_in(execute(example_of(pageloom.contract.quantizer)), KVQuantizer)
    half = quantizer(quantizer.Config())
    x = torch.randn(5, 3, 64)
    coded = half.encode(x, 0, "k")
    assert coded.dtype == torch.uint8
    assert coded.shape == (5, 3, half.bytes_per_vector(64))
    torch.testing.assert_close(half.decode(coded, 0, "k", torch.float32), x, atol=1e-2, rtol=1e-3)


def test_the_loader_example_loads(tmp_path):
    import numpy as np

    from pageloom.contract import WeightLoader

    np.savez(tmp_path / "weights.npz", a=np.ones((2, 3), dtype=np.float32))
    loader = subclass_in(execute(example_of(pageloom.contract.loader)), WeightLoader)
    assert loader.detect(str(tmp_path))
    assert not loader.detect(str(tmp_path / "nothing"))
    (named,) = loader(loader.Config(), str(tmp_path)).tensors()
    assert named[0] == "a"
    assert named[1].shape == (2, 3)


def test_the_tool_parser_example_finds_a_call():
    from pageloom.contract import CallPiece, ToolParser

    kind = subclass_in(execute(example_of(pageloom.contract.tools)), ToolParser)
    called, said = kind(), kind()
    called.feed("CALL weather ")
    called.feed("paris")
    assert called.finish() == [CallPiece(0, "weather"), CallPiece(0, None, '{"word": "paris"}')]
    said.feed("It is warm.")
    assert said.finish() == ["It is warm."]
    assert kind.detect("Write CALL NAME")
    assert "weather" in kind.grammar([{"name": "weather", "parameters": {}}], False, [])


def test_the_executor_example_passes_its_suite(tmp_path, monkeypatch):
    from pageloom.testing import ExecutorSuite

    (tmp_path / "pageloom_apart.py").write_text(example_of(pageloom.contract.executor))
    (tmp_path / "test_apart.py").write_text(example_of(pageloom.testing.executor_suite, "test_"))
    assert ExecutorSuite.__name__ in (tmp_path / "test_apart.py").read_text()
    found = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "600"]
    done = subprocess.run(
        [*command, "test_apart.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": found},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


def test_the_readme_python_runs(capsys, monkeypatch):
    monkeypatch.chdir(Path(__file__).parent.parent)
    (first, *_) = snippets("Engine.from_config")
    (several,) = snippets("beam_width=4")
    (asynchronous,) = snippets("async def main")
    execute(first + several)
    execute(asynchronous)
    assert "Paris" in capsys.readouterr().out


def test_the_readme_names_every_built_in_component():
    from pageloom.plugins import Plugins

    for component in Plugins.load().components:
        if component.package == "pageloom":
            assert f"`{component.name}`" in README, component
