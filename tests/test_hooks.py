"""Every hook is documented and called, and observers cannot stop what they observe."""

import logging
import re
import sys

import pytest

import distributions
from distributions import source
from pageloom.contract import hookimpl, hooks
from pageloom.plugins import KINDS, OBSERVERS, PluginError, Plugins

site = distributions.site

HOOKS = {
    name: spec for name in dir(hooks) if hasattr(spec := getattr(hooks, name), "pageloom_spec")
}


class Recorder:
    def __init__(self):
        self.seen = []

    @hookimpl
    def engine_started(self, info):
        self.seen.append(("engine_started", info))

    @hookimpl
    def step_finished(self, record):
        self.seen.append(("step_finished", record))

    @hookimpl
    def request_finished(self, record):
        self.seen.append(("request_finished", record))


class Faulty(Recorder):
    @hookimpl
    def step_finished(self):
        self.seen.append("faulty")
        raise RuntimeError("no disk left")


def test_every_hook_is_documented():
    assert len(HOOKS) == len(KINDS) + len(OBSERVERS)
    for name, spec in HOOKS.items():
        assert "New in 1." in (spec.__doc__ or ""), name


def test_every_hook_is_called(site, capsys):
    bodies = []
    for name in HOOKS:
        if name in OBSERVERS:
            argument = "info" if name == "engine_started" else "record"
            body = f"print('{name}', {argument})"
        else:
            argument = "register"
            body = f"register('all', 'all_hooks:{name}')"
        bodies.append(f"@hookimpl\ndef {name}({argument}): {body}\n")
    site.install("pageloom-all", {"all_hooks": source("".join(bodies))}, all="all_hooks")
    plugins = Plugins.load(["all"])
    targets = {entry.target.removeprefix("all_hooks:") for entry in plugins.components}
    assert targets == set(HOOKS) - set(OBSERVERS)
    plugins.notify("engine_started", info=1)
    plugins.notify("step_finished", record=2)
    plugins.notify("request_finished", record=3)
    assert capsys.readouterr().out == "engine_started 1\nstep_finished 2\nrequest_finished 3\n"


def test_observers_of_plugins_and_of_run_time_are_told(site, capsys):
    body = "@hookimpl\ndef step_finished(record): print('plugin saw', record)"
    site.install("pageloom-watch", {"watch": source(body)}, watch="watch")
    plugins, recorder = Plugins.load(["watch"]), Recorder()
    plugins.register_observer(recorder)
    plugins.notify("engine_started", info="i")
    plugins.notify("step_finished", record="s")
    plugins.notify("request_finished", record="r")
    assert recorder.seen == [
        ("engine_started", "i"),
        ("step_finished", "s"),
        ("request_finished", "r"),
    ]
    assert capsys.readouterr().out == "plugin saw s\n"


def test_an_observer_that_raises_is_logged_once_and_never_called_again(caplog):
    plugins, faulty, recorder = Plugins(), Faulty(), Recorder()
    plugins.register_observer(recorder)
    plugins.register_observer(faulty)
    for step in range(3):
        plugins.notify("step_finished", record=step)
    plugins.notify("request_finished", record="r")
    assert faulty.seen == ["faulty"]
    assert [record for _, record in recorder.seen] == [0, 1, 2, "r"]
    (record,) = caplog.records
    message = (
        r"Faulty@\w+ raised in step_finished and is not called again: RuntimeError: no disk left"
    )
    assert re.search(message, record.message)


def test_the_traceback_of_an_observer_is_a_debug_message(caplog):
    caplog.set_level(logging.DEBUG, "pageloom")
    plugins = Plugins()
    plugins.register_observer(Faulty())
    plugins.notify("step_finished", record=None)
    error, trace = caplog.records
    assert (error.levelno, trace.levelno) == (logging.ERROR, logging.DEBUG)
    assert "\n" not in error.message
    assert trace.message.startswith("Traceback")


def test_an_observer_of_a_plugin_that_raises_is_logged_with_the_plugins_name(site, caplog):
    body = "@hookimpl\ndef step_finished(): raise SystemExit(3)"
    site.install("pageloom-watch", {"watch": source(body)}, watch="watch")
    plugins = Plugins.load(["watch"])
    for _ in range(2):
        plugins.notify("step_finished", record=None)
    assert caplog.messages == [
        "plugin pageloom-watch:watch raised in step_finished and is not called again: SystemExit: 3"
    ]


def test_notifying_nobody_calls_nothing():
    """So that it costs less than a microsecond, whatever the machine."""
    plugins, callers = Plugins(), []

    def note(frame, event, function):
        if event in ("call", "c_call") and function is not sys.setprofile:
            callers.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        plugins.notify("step_finished", record=None)
    finally:
        sys.setprofile(None)
    assert callers == ["notify"]  # entered, and no function of Python or C called from it


class Nothing:
    pass


class Registers:
    @hookimpl
    def register_schedulers(self, register): ...


class Misspelt:
    @hookimpl
    def step_finish(self): ...


class Unhashable(Recorder):
    __hash__ = None


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Nothing, "it implements none"),
        (Registers, "nothing else; it implements register_schedulers"),
        (Misspelt, "did you mean 'step_finished'"),
        (Unhashable, "must be hashable"),
    ],
)
def test_only_observers_are_accepted_at_run_time(kind, reason):
    plugins = Plugins()
    with pytest.raises(PluginError, match=reason):
        plugins.register_observer(kind())
    plugins.notify("step_finished", record=None)


def test_hook_calls_are_traced_to_stderr_if_asked(site, monkeypatch, capsys):
    body = "@hookimpl\ndef register_schedulers(register): pass"
    site.install("pageloom-lifo", {"lifo": source(body)}, lifo="lifo")
    monkeypatch.setenv("PAGELOOM_TRACE", "0")
    Plugins.load(["lifo"])
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("PAGELOOM_TRACE", "1")
    Plugins.load(["lifo"])
    assert "register_schedulers" in capsys.readouterr().err
