"""The command line, run as users run it."""

import json
import re
import subprocess
import sys
from importlib.metadata import version

import pytest

import distributions
from distributions import source
from pageloom.cli import main
from pageloom.scheduling import PolicyError

site = distributions.site

HEAD = "model: {path: m}\n"

BACKENDS = """
from pageloom.contract import AttentionBackend, hookimpl

contract_version = "1.0"

@hookimpl
def register_attention_backends(register):
    register("picky", "kernels:Picky")
    register("ready", "kernels:Ready")
    register("buggy", "kernels:Buggy")
    register("absent", "kernels_absent:Absent")

@hookimpl
def register_schedulers(register):
    register("unfinished", "kernels:Unfinished")

class Ready(AttentionBackend):
    @classmethod
    def check(cls, spec):
        assert (spec.block_size, spec.max_model_len, spec.layers[0].head_size) == (16, 4096, 128)
    def bytes_per_block(self): ...
    def allocate(self, num_blocks): ...
    def plan(self, batch): ...
    def forward(self, layer, q, k, v, out, sinks=None): ...
    def copy_blocks(self, pairs): ...
    def read_blocks(self, blocks): ...
    def write_blocks(self, blocks, data): ...

class Picky(Ready):
    @classmethod
    def check(cls, spec):
        return "needs a full moon"

class Buggy(Ready):
    @classmethod
    def check(cls, spec):
        return 1 / 0

from pageloom.contract import Scheduler

class Unfinished(Scheduler): ...
"""


@pytest.fixture
def run(capsys):
    """Run a command line in this process: exit code, standard output, standard error."""

    def run(*arguments):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        return caught.value.code or 0, *capsys.readouterr()

    return run


@pytest.fixture
def kernels(site, monkeypatch):
    site.install("pageloom-kernels", {"kernels": BACKENDS}, "0.4", kernels="kernels")
    site.install("pageloom-bad", {"bad": "import nothing_of_that_name"}, bad="bad")
    monkeypatch.setenv("PAGELOOM_PLUGINS", "kernels,bad")
    monkeypatch.setenv("COLUMNS", "200")


def test_help_imports_little():
    """So that it is there in a fraction of a second, whatever the machine."""
    script = (
        "import sys\n"
        "from pageloom.cli import main\n"
        "try: main(['--help'])\n"
        "finally: print('imported:', len(sys.modules), {'torch', 'transformers', 'numpy', 'yaml', "
        "'pageloom.engine', 'pageloom.serve', 'pageloom.bench'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert {"plugins", "config"} <= set(done.stdout.split())
    imported, heavy = re.search(r"imported: (\d+) (.*)", done.stdout).groups()
    assert heavy == "set()"
    assert int(imported) < 500


def test_the_version(run):
    assert run("--version")[:2] == (0, f"{version('pageloom')}\n")


def test_the_console_script_is_installed():
    done = subprocess.run(
        [sys.executable, "-c", "from importlib.metadata import entry_points as e;"
         "e(group='console_scripts')['pageloom'].load()(['config'])"],
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 2
    assert "Missing argument" in done.stderr


def test_plugins_lists_every_component_and_why_it_cannot_run(run, kernels):
    code, out, err = run("plugins")
    assert code == 0
    rows = {cells[0]: cells for line in out.splitlines() if len(cells := _cells(line)) == 5}
    origin = ["kernels", "pageloom-kernels 0.4"]
    assert rows["ready"] == ["ready", *origin, "yes", ""]
    assert rows["picky"] == ["picky", *origin, "no", "needs a full moon"]
    assert rows["buggy"][3:] == ["no", "its check raised ZeroDivisionError: division by zero"]
    absent = "cannot be imported: ModuleNotFoundError: No module named 'kernels_absent'"
    assert rows["absent"][3:] == ["no", absent]
    headings = [name for name, cells in rows.items() if cells[1:] == [""] * 4]
    assert headings == ["attention_backend", "scheduler"]
    assert rows["unfinished"][4] == "does not implement schedule"
    failed = next(_cells(line) for line in out.splitlines() if "pageloom-bad" in line)
    assert failed[0] == "bad"
    assert failed[2].startswith("ModuleNotFoundError: No module named 'nothing_of_that_name'")
    assert "Traceback" not in out + err


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("def register_scheduler(register): ...", "function register_scheduler implements no hook"),
        ("def step_finished(engine): ...", "it does not fit the contract"),
        ("def register_schedulers(register): register('unfinished', 'm:A')", "registered by both"),
    ],
)
def test_plugins_lists_a_plugin_that_breaks_the_contract(
    run, kernels, site, monkeypatch, body, reason
):
    site.install("pageloom-rude", {"rude": source(f"@hookimpl\n{body}")}, rude="rude")
    monkeypatch.setenv("PAGELOOM_PLUGINS", "kernels,rude")
    code, out, _ = run("plugins")
    assert code == 0
    assert "picky" in out
    assert reason in out.partition("Not loaded")[2]


def test_plugins_cuts_nothing_where_the_terminal_is_narrow(run, kernels, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    _, out, _ = run("plugins")
    rows = [cells for line in out.splitlines() if len(cells := _cells(line)) == 5]
    columns = zip(*rows, strict=True)
    names, _, packages, _, reasons = columns
    assert "unfinished" in names
    assert "pageloom-kernels0.4" in "".join(packages)
    assert "ModuleNotFoundError" in "".join(reasons)
    assert "…" not in out


def test_plugins_as_json_says_the_same(run, kernels):
    code, out, _ = run("plugins", "--json")
    listing = json.loads(out)
    assert code == 0
    assert listing["components"][2] == {
        "kind": "attention_backend",
        "name": "picky",
        "target": "kernels:Picky",
        "plugin": "kernels",
        "package": "pageloom-kernels",
        "version": "0.4",
        "available": False,
        "reason": "needs a full moon",
    }
    (failure,) = listing["failures"]
    assert (failure["name"], failure["package"]) == ("bad", "pageloom-bad")
    assert "Traceback" in failure["traceback"]


def test_config_prints_what_can_be_loaded_again(run, tmp_path):
    (tmp_path / "c.yaml").write_text(HEAD)
    code, out, _ = run(
        "config", str(tmp_path / "c.yaml"), "--set", "runtime.seed=7", "--set", "model.path=n"
    )
    assert code == 0
    assert re.search(r"seed: 7 +# --set runtime.seed=7", out)
    (tmp_path / "again.yaml").write_text(out)
    _, again, _ = run("config", str(tmp_path / "again.yaml"))
    assert re.sub(" *#.*", "", again) == re.sub(" *#.*", "", out)


def test_wrong_configurations_are_one_message_and_exit_code_2(run, tmp_path):
    (tmp_path / "c.yaml").write_text(f"{HEAD}schedulr: 1\n")
    code, out, err = run("config", str(tmp_path / "c.yaml"), "--set", "foo")
    assert (code, out) == (2, "")
    assert err.startswith("pageloom: 2 problems in the configuration:\n")
    assert "did you mean scheduler?" in err
    assert "Traceback" not in err


def test_wrong_plugins_are_one_message_and_exit_code_2(run, site, monkeypatch):
    monkeypatch.setenv("PAGELOOM_PLUGINS", "nope")
    code, out, err = run("plugins")
    assert (code, out) == (2, "")
    assert err.startswith("pageloom: PAGELOOM_PLUGINS: 'nope' is not installed")


def test_commands_that_sample_share_options_but_not_all_defaults(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    listed = {}
    for command in ("generate", "chat"):
        _, out, _ = run(command, "--help")
        listed[command] = dict(re.findall(r"--([a-z-]+) .*\[default: ([\d.]+)\]", out))
    assert listed["generate"] == {
        "max-tokens": "256",
        "temperature": "1.0",
        "top-k": "0",
        "top-p": "1.0",
        "min-p": "0.0",
        "repetition-penalty": "1.0",
        "n": "1",
        "length-penalty": "1.0",
    }
    several = ("n", "length-penalty")
    common = {name: v for name, v in listed["generate"].items() if name not in several}
    other = {"max-tokens": "1024", "temperature": "0.7", "top-p": "0.95"}
    assert listed["chat"] == common | other


def test_wrong_usage_is_exit_code_2(run):
    assert run("config")[0] == 2
    assert run("nonsense")[0] == 2
    assert run("plugins", "--nonsense")[0] == 2


@pytest.mark.parametrize(
    "arguments", [("--debug", "config", "gone"), ("config", "gone", "--debug")]
)
def test_debug_anywhere_shows_the_traceback(arguments):
    command = [sys.executable, "-c", "from pageloom.cli import main; main()", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "ConfigError: gone: there is no file gone" in done.stderr


def test_debug_behind_two_dashes_is_an_argument(run):
    code, _, err = run("config", "--", "--debug")
    assert code == 2
    assert "there is no file --debug" in err


def test_a_policy_that_fails_is_its_plain_sentence_and_exit_code_1(run, monkeypatch, tmp_path):
    def fail(config):
        raise PolicyError("scheduler 'x' is stuck")

    (tmp_path / "c.yaml").write_text(HEAD)
    monkeypatch.setattr("pageloom.config.render", fail)
    code, _, err = run("config", str(tmp_path / "c.yaml"))
    assert (code, err) == (1, "pageloom: scheduler 'x' is stuck\n")


def test_output_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "c.yaml").write_text(HEAD)
    script = "from pageloom.cli import main; main()"
    command = f"{sys.executable} -c '{script}' config {tmp_path / 'c.yaml'}"
    done = subprocess.run(f"{command} > /dev/full", shell=True, capture_output=True, text=True)
    message = "pageloom: the output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (2, message)
    done = subprocess.run(f"{command} <&- >&-", shell=True, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_defect_is_one_line_and_exit_code_1(run, monkeypatch, tmp_path):
    (tmp_path / "c.yaml").write_text(HEAD)
    monkeypatch.setattr("pageloom.config.render", lambda config: 1 / 0)
    code, _, err = run("config", str(tmp_path / "c.yaml"))
    assert code == 1
    assert err == (
        "pageloom: ZeroDivisionError: division by zero (an unexpected error; --debug shows where)\n"
    )


def _cells(line):
    return [cell.strip() for cell in line.strip("│").split("│")] if line.startswith("│") else []
