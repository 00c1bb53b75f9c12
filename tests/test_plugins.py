"""Finding plugins, loading them, and what is said of those that do not fit."""

import logging
import re
import signal
import subprocess
import sys
from dataclasses import dataclass

import pytest

import distributions
from distributions import source
from pageloom.commands.plugins import reason_against
from pageloom.config import build_options
from pageloom.contract import CONTRACT_VERSION, Scheduler, hookimpl
from pageloom.plugins import ComponentEntry, PluginError, Plugins, UnknownPluginError, blame

site = distributions.site

REGISTERS = """
    from pageloom.contract import hookimpl
    contract_version = "1.0"

    @hookimpl
    def register_schedulers(register):
        register("{name}", "{target}")
    """

POLICY = """
    from pageloom.contract import Scheduler

    class Lifo(Scheduler):
        def schedule(self, view, plan):
            pass

    class Unfinished(Scheduler):
        pass

    class Unrelated:
        pass
    """


def test_every_component_that_comes_with_pageloom_is_registered_like_anyones(site):
    found = {(entry.kind, entry.name) for entry in Plugins.load(allow=["pageloom"]).components}
    assert found >= {
        ("scheduler", "fcfs"),
        ("attention_backend", "cpu_paged"),
        ("attention_backend", "naive_contiguous"),
        ("attention_backend", "torch_paged"),
        ("weight_loader", "hf"),
        ("weight_loader", "gguf"),
        ("weight_loader", "dummy"),
        ("tool_parser", "hermes"),
        ("tool_parser", "llama3_json"),
    }


def test_a_component_is_listed_without_importing_it_and_imported_when_asked_for(site):
    modules = {"lifo": REGISTERS.format(name="lifo", target="lifo_policy:Lifo")}
    site.install("pageloom-lifo", {**modules, "lifo_policy": POLICY}, "0.3", lifo="lifo")
    plugins = Plugins.load(allow=["lifo"])
    assert plugins.components == [
        ComponentEntry("scheduler", "lifo", "lifo_policy:Lifo", "lifo", "pageloom-lifo", "0.3")
    ]
    assert plugins.names("scheduler") == ["lifo"]
    assert "lifo_policy" not in sys.modules
    assert issubclass(plugins.get("scheduler", "lifo"), Scheduler)


def test_loading_imports_no_torch():
    script = (
        "import sys; from pageloom.plugins import Plugins;"
        "print(len(Plugins.load().components), 'torch' in sys.modules)"
    )
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert re.fullmatch(r"\d+ False\n", printed.stdout), printed


def test_an_unknown_component_is_reported_with_the_nearest_and_all_names(site):
    modules = {"lifo": REGISTERS.format(name="lifo", target="lifo_policy:Lifo")}
    site.install("pageloom-lifo", modules, lifo="lifo")
    with pytest.raises(PluginError, match=r"no scheduler 'lifoo'; did you mean 'lifo'\? .*lifo"):
        Plugins.load(allow=["lifo"]).get("scheduler", "lifoo")


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("lifo_policy:Unfinished", "does not implement schedule"),
        ("lifo_policy:Unrelated", "not a subclass of pageloom.contract.Scheduler"),
        ("lifo_policy:Nowhere", "module lifo_policy has no Nowhere"),
        ("lifo_broken:Lifo", "cannot be imported: ImportError: needs a compiler"),
        ("lifo_quits:Lifo", "cannot be imported: SystemExit: 3"),
        ("lifo_nowhere:Lifo", "cannot be imported: ModuleNotFoundError"),
    ],
)
def test_a_class_that_cannot_be_used_is_reported_with_its_owner(site, target, reason):
    modules = {
        "lifo": REGISTERS.format(name="lifo", target=target),
        "lifo_policy": POLICY,
        "lifo_quits": "raise SystemExit(3)",
        "lifo_broken": "raise ImportError('needs a compiler')",
    }
    site.install("pageloom-lifo", modules, "0.3", lifo="lifo")
    plugins = Plugins.load(allow=["lifo"])
    with pytest.raises(PluginError, match=f"'lifo' .*of pageloom-lifo 0.3.*{reason}"):
        plugins.get("scheduler", "lifo")


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        (None, r'does not state .* needs contract_version = "1\.2"'),
        ('"one"', r"contract_version is 'one', which is not of the form"),
        ("1.0", r"contract_version is 1\.0, which is not of the form"),
        ('"2.0"', r"contract 2\.0 and this engine has 1\.2, another major version"),
        ('"0.9"', r"contract 0\.9 and this engine has 1\.2, another major version"),
        ('"1.7"', r"contract 1\.7 and this engine has 1\.2; upgrade pageloom"),
    ],
)
def test_a_plugin_for_another_contract_is_refused_by_name(site, caplog, version, reason):
    stated = "" if version is None else f"contract_version = {version}"
    module = REGISTERS.format(name="x", target="x:X").replace('contract_version = "1.0"', stated)
    site.install("pageloom-old", {"old": module}, old="old")
    plugins = Plugins.load(allow=["old"])
    (failure,) = plugins.failures
    assert plugins.components == []
    assert re.search(
        rf"plugin 'old' \(pageloom-old 1\.0\) failed to load: .*{reason}", str(failure)
    )
    assert str(failure) in caplog.messages


@pytest.mark.parametrize("version", ["1.0", CONTRACT_VERSION])
def test_the_engines_own_contract_version_is_accepted_and_older_ones_are(site, version):
    site.install("pageloom-same", {"same": source(version=version)}, same="same")
    assert Plugins.load(allow=["same"]).failures == []


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("import nothing_of_that_name", "ModuleNotFoundError: No module named 'nothing_of_"),
        ("def f(:", "SyntaxError"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("@hookimpl\ndef register_schedulers(register):\n    1 / 0", "ZeroDivisionError"),
        (
            "@hookimpl\ndef register_schedulers(register):\n    register('a', 'm:A')\n"
            "    register('b', 'm.B')",
            r"ValueError: target 'm.B' is not of the form 'package.module:Class'",
        ),
        (
            "@hookimpl\ndef register_schedulers(register):\n    register('auto', 'm:B')",
            "ValueError: 'auto' cannot be the name of a scheduler",
        ),
        ("@hookimpl\ndef register_schedulers(register):\n    raise SystemExit(3)", "SystemExit: 3"),
        (
            "@hookimpl\ndef register_schedulers(register):\n    register(3, 'm:A')",
            r"TypeError: register\(3, 'm:A'\): the name and the target are texts",
        ),
        (
            "class A: ...\n@hookimpl\ndef register_schedulers(register):\n    register('a', A)",
            r"TypeError: register\('a', <class 'bad.A'>\): .* of the form 'package.module:Class'",
        ),
    ],
)
def test_a_plugin_that_fails_is_kept_with_its_traceback_and_the_others_load(
    site, caplog, body, reason
):
    caplog.set_level(logging.DEBUG, "pageloom")
    site.install("pageloom-bad", {"bad": source(body)}, bad="bad")
    site.install("pageloom-good", {"good": REGISTERS.format(name="g", target="g:G")}, good="good")
    plugins = Plugins.load(allow=["bad", "good"])
    assert plugins.names("scheduler") == ["g"]
    (failure,) = plugins.failures
    assert re.search(rf"'bad' \(pageloom-bad 1.0\) failed to load: {reason}", str(failure))
    assert "Traceback" in failure.traceback
    warning = next(record for record in caplog.records if record.levelno == logging.WARNING)
    assert warning.message == str(failure)
    assert "\n" not in warning.message
    assert failure.traceback in caplog.messages
    with pytest.raises(PluginError, match=r"'bad' .*failed to load"):
        plugins.get("scheduler", "a")


def test_a_function_that_matches_no_hook_is_an_error_with_the_nearest_hook(site):
    body = "@hookimpl\ndef register_scheduler(register): pass"
    site.install("pageloom-typo", {"typo": source(body)}, typo="typo")
    message = (
        r"'typo' \(pageloom-typo 1.0\) failed to load: function register_scheduler implements "
    )
    (failure,) = Plugins.load(allow=["typo"]).failures
    assert failure.fatal
    assert re.search(message + "no hook .* did you mean 'register_schedulers'", str(failure))


def test_an_argument_that_a_hook_does_not_have_is_an_error(site):
    body = "@hookimpl\ndef step_finished(record, engine): pass"
    site.install("pageloom-typo", {"typo": source(body)}, typo="typo")
    (failure,) = Plugins.load(allow=["typo"]).failures
    assert failure.fatal
    assert re.search(r"'typo' .* does not fit the contract: .*'engine'", str(failure))


def test_two_plugins_that_claim_one_name_are_both_named(site):
    for package in ("first", "second"):
        modules = {package: REGISTERS.format(name="lifo", target=f"{package}:Lifo")}
        site.install(f"pageloom-{package}", modules, **{package: package})
    message = r"scheduler 'lifo' is registered by both pageloom-first 1.0 .*pageloom-second 1.0"
    plugins = Plugins.load(allow=["first", "second"])
    (failure,) = plugins.failures
    assert (failure.plugin.name, failure.fatal) == ("second", True)
    assert re.search(message, str(failure))
    assert [entry.package for entry in plugins.components] == ["pageloom-first"]
    assert Plugins.load(["first", "second"], deny=["first"]).names("scheduler") == ["lifo"]


def test_the_same_name_for_two_kinds_is_no_clash(site):
    body = """
@hookimpl
def register_schedulers(register): register("x", "x:X")
@hookimpl
def register_weight_loaders(register): register("x", "x:X")
"""
    site.install("pageloom-x", {"x": source(body)}, x="x")
    assert [entry.kind for entry in Plugins.load(["x"]).components] == [
        "scheduler",
        "weight_loader",
    ]


def test_two_entry_points_for_one_module_are_an_error(site):
    site.install("pageloom-x", {"x": source()}, one="x", two="x")
    (failure,) = Plugins.load(["pageloom-x"]).failures
    assert failure.fatal
    assert re.search(r"'two' .*is already registered as pageloom-x:one", str(failure))


class TestLimits:
    @pytest.fixture(autouse=True)
    def _installed(self, site):
        for name in ("aa", "bb", "cc"):
            modules = {name: REGISTERS.format(name=name, target=f"{name}:X")}
            site.install(f"Pageloom_{name}", modules, **{name: name})

    @pytest.mark.parametrize(
        ("allow", "deny", "variable", "loaded"),
        [
            (["aa", "bb"], [], None, ["aa", "bb"]),
            (["pageloom-aa", "PAGELOOM.BB"], [], None, ["aa", "bb"]),
            (["aa", "bb"], ["pageloom_bb"], None, ["aa"]),
            (["aa", "bb"], [], "bb, cc", ["bb"]),
            (None, [], "pageloom-cc", ["cc"]),
            (None, ["cc"], "pageloom-cc", []),
            (None, ["pageloom"], None, ["aa", "bb", "cc"]),
            (None, ["aa"], None, ["bb", "cc"]),
            (None, [], "", []),
            ([], [], None, []),
        ],
    )
    def test_what_is_loaded(self, monkeypatch, allow, deny, variable, loaded):
        if variable is not None:
            monkeypatch.setenv("PAGELOOM_PLUGINS", variable)
        names = Plugins.load(allow, deny).names("scheduler")  # others may be installed too
        assert [name for name in names if name in ("aa", "bb", "cc")] == loaded
        if allow is not None or variable is not None:
            assert names == loaded

    def test_what_is_denied_is_not_even_imported(self, site):
        site.install("pageloom-dd", {"dd": "raise SystemExit"}, dd="dd")
        plugins = Plugins.load(deny=["dd", "pageloom"])
        assert not [failure for failure in plugins.failures if failure.plugin.name == "dd"]
        assert re.search(r"excluded by plugins.deny: .*dd \(pageloom-dd\)", plugins.unloaded())

    def test_what_is_not_loaded_is_told_with_the_list_that_excludes_it(self, monkeypatch):
        monkeypatch.setenv("PAGELOOM_PLUGINS", "aa,cc")
        plugins = Plugins.load(["aa", "bb", "cc"], ["cc"])
        by = {info.name: key for info, key in plugins.skipped.items()}
        assert (by["cc"], by["bb"], by["core"]) == (
            "plugins.deny",
            "PAGELOOM_PLUGINS",
            "plugins.allow",
        )

    def test_all_unknown_names_are_reported_at_once(self, monkeypatch):
        monkeypatch.setenv("PAGELOOM_PLUGINS", "nope")
        with pytest.raises(UnknownPluginError) as caught:
            Plugins.load(["yy", "xx"], ["zz"])
        assert list(caught.value.reasons) == ["plugins.allow", "plugins.deny", "PAGELOOM_PLUGINS"]
        for name in ("yy", "xx", "zz", "nope"):
            assert f"{name!r} is not installed" in str(caught.value)

    def test_an_unknown_name_is_an_error_that_lists_what_there_is(self, monkeypatch):
        for arguments, key in (({"allow": ["aaa"]}, "allow"), ({"deny": ["aaa"]}, "deny")):
            message = rf"plugins\.{key}: 'aaa' is not installed, did you mean 'aa'\? .*bb, cc"
            with pytest.raises(PluginError, match=message):
                Plugins.load(**arguments)
        monkeypatch.setenv("PAGELOOM_PLUGINS", "aa,zz")
        with pytest.raises(PluginError, match="PAGELOOM_PLUGINS: 'zz' is not installed"):
            Plugins.load()


def _quit(*_):
    sys.exit(3)


def _quit_by_name(signum, frame):
    sys.exit(3)


class _Owner:
    def quit(self, signum, frame):
        sys.exit(3)


def test_a_component_that_exits_is_named():
    with (
        pytest.raises(PluginError, match="scheduler 'lifo' failed: SystemExit: 3"),
        blame("scheduler", "lifo"),
    ):
        _quit()


class Interrupted:
    """An observer in whose middle the process is told to end."""

    @hookimpl
    def engine_started(self, info):
        signal.raise_signal(signal.SIGUSR1)


class Interrupting:
    """A component in the middle of whose code the process is told to end."""

    @dataclass
    class Config:
        def __post_init__(self):
            signal.raise_signal(signal.SIGUSR1)

    @classmethod
    def block_size(cls, wanted, max_model_len):
        signal.raise_signal(signal.SIGUSR1)


@pytest.fixture(params=[_quit, _quit_by_name, _Owner().quit])
def _signals_quit(request):
    before = signal.signal(signal.SIGUSR1, request.param)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("_signals_quit")
def test_a_signal_that_ends_the_process_is_not_the_fault_of_whoever_runs():
    with pytest.raises(SystemExit) as caught, blame("scheduler", "lifo"):
        signal.raise_signal(signal.SIGUSR1)
    assert caught.value.code == 3
    plugins = Plugins()
    plugins.register_observer(Interrupted())
    with pytest.raises(SystemExit):
        plugins.notify("engine_started", info=None)
    assert plugins.observes("engine_started")


@pytest.mark.usefixtures("_signals_quit")
def test_nor_is_it_a_fault_of_options_or_of_a_check(monkeypatch):
    with pytest.raises(SystemExit):
        build_options(Interrupting, {})
    monkeypatch.setattr(Plugins, "get", lambda self, kind, name: Interrupting)
    with pytest.raises(SystemExit):
        reason_against(ComponentEntry("attention_backend", "i", "m:I", "p", "p", "1"), Plugins())
