"""``pageloom bench attention``, as a user runs it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from attention_bench import DECODE, MIXED, ROOT, bench, run

from pageloom.bench.attention.results import load_run
from pageloom.bench.figures import COLORS
from pageloom.cli import main

BACKENDS = ["naive_contiguous", "torch_paged", "sdpa"]


def test_the_table_has_every_backend_and_every_reason(recorded):
    result, _ = recorded
    assert result.returncode == 0, result.stderr
    number, share = r"[\d.,e+-]+", r"[\d.]+%"
    for backend in (*BACKENDS[:2], "sdpa (peer)"):
        row = rf"^ *{re.escape(backend)} +{number} +{share} .*{share} *$"
        assert re.search(row, result.stdout, re.MULTILINE), backend
    said = " ".join(result.stdout.split())
    assert "triton_paged needs a GPU" in said
    assert "sdpa refuses block size 16" in said
    assert "Medians over 6 interleaved rounds" in said


def test_the_json_is_of_pytest_benchmark(recorded, tmp_path):
    _, folder = recorded
    data = json.loads((folder / "run.json").read_text())
    cases = {(b["params"]["case"], b["params"]["backend"]) for b in data["benchmarks"]}
    assert cases == {*((DECODE, name) for name in BACKENDS), (MIXED, "torch_paged")}
    for benchmark in data["benchmarks"]:
        assert benchmark["stats"]["rounds"] == len(benchmark["stats"]["data"]) == 6
    program = Path(sys.executable).with_name("pytest-benchmark")
    command = ["compare", folder / "run.json", "--columns=median,rounds", f"--csv={tmp_path / 'a'}"]
    result = run(program, *command)
    assert result.returncode == 0, result.stderr
    for case, backend in cases:
        assert f"test_attention[{case}-{backend}]" in result.stdout


def test_the_pytest_suite_records_the_same(recorded, tiny, tmp_path):
    _, folder = recorded
    result = run(
        "-m", "pytest", "benchmarks/test_attention.py", "--benchmark-enable", "-p",
        "no:cacheprovider", "--benchmark-json", tmp_path / "own.json",
        PAGELOOM_BENCH_ATTENTION=tiny,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout
    assert "4 passed, 4 skipped" in result.stdout
    assert "triton_paged needs a GPU" in result.stdout
    mine, theirs = (
        {b["fullname"]: b for b in json.loads(file.read_text())["benchmarks"]}
        for file in (tmp_path / "own.json", folder / "run.json")
    )
    assert mine.keys() == theirs.keys()
    for name, benchmark in mine.items():
        for key in ("group", "name", "param", "params"):
            assert benchmark[key] == theirs[name][key]
        assert benchmark["extra_info"].keys() == theirs[name]["extra_info"].keys()
    for entry, benchmark in zip(
        load_run(tmp_path / "own.json").entries, mine.values(), strict=True
    ):
        assert entry.seconds == pytest.approx(benchmark["stats"]["data"])


def test_an_earlier_run_that_was_faster_is_a_regression(recorded, tiny, tmp_path):
    _, folder = recorded
    data = json.loads((folder / "run.json").read_text())
    for benchmark in data["benchmarks"]:
        factor = 0.01 if benchmark["params"]["backend"] == "torch_paged" else 100
        for key in ("plan", "forward"):
            info = benchmark["extra_info"]
            info[key] = [seconds * factor for seconds in info[key]]
    old = tmp_path / "old.json"
    old.write_text(json.dumps(data))
    result = bench(tiny, "--compare", old, "--output", tmp_path / "report")
    assert result.returncode == 1, result.stderr
    assert re.search(r"torch_paged .* slower", result.stdout)
    assert re.search(r"sdpa .* faster", result.stdout)
    assert "Since the earlier run" in (tmp_path / "report" / "index.html").read_text()
    only_others = bench(tiny, "--compare", old, "--set", "backends=[naive_contiguous]",
                        "--baseline", "sdpa")  # fmt: skip
    assert only_others.returncode == 0, only_others.stderr
    assert "Timed then, not now: torch_paged" in " ".join(only_others.stdout.split())


PLUGIN = """
from pageloom.contract import hookimpl
from pageloom_attention.torch_paged import TorchPaged

contract_version = "1.0"

@hookimpl
def register_attention_backends(register):
    register("theirs", "their_plugin:Theirs")
    register("theirs_wrong", "their_plugin:Wrong")

class Theirs(TorchPaged): ...

class Wrong(TorchPaged):
    def forward(self, layer, q, k, v, out, sinks=None):
        super().forward(layer, q, k, v, out)
        out[:, 0] = 0
"""


@pytest.fixture
def third_party(tmp_path):
    """A folder with a distribution that is not in this repository."""
    info = tmp_path / "their_plugin-7.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-plugin\nVersion: 7.0\n")
    (info / "entry_points.txt").write_text("[pageloom]\ntheirs = their_plugin\n")
    (tmp_path / "their_plugin.py").write_text(PLUGIN)
    return tmp_path


def test_installed_plugins_take_part_and_wrong_ones_are_told(third_party, tiny):
    result = bench(
        tiny, "--set", "backends=null", "--set", "rounds=1", "--json", third_party / "run.json",
        PYTHONPATH=third_party,
    )  # fmt: skip
    assert result.returncode == 1, result.stderr  # one of them is wrong
    run = load_run(third_party / "run.json")
    packages = {entry.backend: entry.package for entry in run.entries}
    assert packages["theirs"] == "their-plugin 7.0"
    assert {one.backend for one in run.failed} == {"theirs_wrong"}
    said = " ".join(result.stdout.split())
    assert "theirs_wrong is wrong, so it is not timed" in said
    assert "An interval takes 6 rounds or more" in said  # and this is of one


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--baseline", "torch_page"], "'torch_page' takes no part; did you mean 'torch_paged'?"),
        (["--set", "backends=[mine]"], "there is no attention backend 'mine'"),
        (["--set", "cases.0.dtype=[int3]"], "cases"),
        (["--set", "device=cuda:7"], "CUDA devices here"),
        (["--json", "no/such/folder.json"], "there is no folder no/such"),
        (["--compare", "README.md"], "is not what `pageloom bench attention --json` writes"),
        (["--compare", "none.json"], "none.json cannot be read"),
    ],
)
def test_mistakes_are_one_sentence(arguments, message, tiny, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as caught:
        main(["bench", "attention", *map(str, (tiny, *arguments))])
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert message in " ".join(said.split())
    assert "Traceback" not in said


def test_the_page_has_everything_in_it(recorded):
    _, folder = recorded
    page = (folder / "index.html").read_text()
    figures = sorted(file.name for file in folder.glob("*.png"))
    assert figures == ["roofline.png", "speed_decode.png", "speed_mixed.png"]
    assert page.count('src="data:image/png;base64,') == len(figures)
    assert not re.search(r'(src|href)=(?!"data:)', page)
    assert "url(" not in page
    for text in (*BACKENDS, "triton_paged needs a GPU", "Roofline"):
        assert text.lower() in page.lower()


CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium to open the page with")
def test_a_browser_without_network_shows_the_plots(recorded, tmp_path):
    _, folder = recorded
    shot = tmp_path / "shot.png"
    subprocess.run(
        [
            CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={tmp_path / 'profile'}",
            "--window-size=1100,3000", f"--screenshot={shot}", (folder / "index.html").as_uri(),
        ],
        check=True, capture_output=True, timeout=1200,
    )  # fmt: skip
    pixels = (matplotlib.image.imread(shot)[..., :3] * 255).round().astype(int)
    for color in COLORS[: len(BACKENDS)]:
        wanted = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
        near = (np.abs(pixels - wanted) <= 4).all(-1)
        assert near.sum() > 500, f"no bar of color {color} is to be seen"
