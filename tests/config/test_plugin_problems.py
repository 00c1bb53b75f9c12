"""What the configuration needs of its plugins, loaded by its own lists."""

import logging

import pytest

from distributions import source
from pageloom.config import ConfigError, load_config
from pageloom.plugins import Plugins

HEAD = "model: {path: m}\nscheduler: {policy: plain}\n"  # two lines


@pytest.fixture(autouse=True)
def _installed(plugins, site, caplog):
    caplog.set_level(logging.CRITICAL)
    site.install("pageloom-bad", {"bad": "import nothing_of_that_name"}, bad="bad")


@pytest.fixture
def refused(write):
    """The problems, as lines, of a configuration with this text that loads its own plugins."""

    def refused(text, overrides=()):
        with pytest.raises(ConfigError) as caught:
            load_config(write("c.yaml", HEAD + text), overrides)
        return [str(problem) for problem in caught.value.problems]

    return refused


def test_an_unknown_name_in_a_list_is_reported_at_the_list(refused):
    (said,) = refused("plugins:\n  allow: [cfgkit]\n  deny: [cfgkitt]")
    start = "c.yaml:5: plugins.deny: 'cfgkitt' is not installed, did you mean 'cfgkit'? there are"
    assert said.startswith(start)


def test_an_unknown_name_in_the_environment_is_reported_there(refused, monkeypatch):
    monkeypatch.setenv("PAGELOOM_PLUGINS", "cfgkit,nope")
    (said,) = refused("")
    assert said.startswith("environment: PAGELOOM_PLUGINS: 'nope' is not installed")


def test_an_allowed_plugin_that_failed_stops_start_up(refused):
    (said,) = refused("plugins: {allow: [cfgkit, bad]}")
    assert said.startswith("c.yaml:3: plugins.allow = \"bad\": plugin 'bad' (pageloom-bad 1.0)")
    assert "No module named 'nothing_of_that_name'" in said


def test_a_name_that_a_failed_or_excluded_plugin_may_own_says_so(refused):
    (said,) = refused("kv_cache: {quantizer: q}\nplugins: {deny: [pageloom]}")
    assert "plugin 'bad' (pageloom-bad 1.0) failed to load: ModuleNotFoundError" in said
    assert "excluded by plugins.deny: attention (pageloom)" in said


def test_a_failed_plugin_that_nobody_needs_does_not_stop_start_up(write):
    assert load_config(write("c.yaml", HEAD)).scheduler.policy == "plain"


def test_a_wrong_list_keeps_plugins_from_being_imported_at_all(refused, monkeypatch):
    monkeypatch.setattr(Plugins, "load", lambda *_: pytest.fail("loaded"))
    (said,) = refused("plugins: {allow: cfgkit}")
    assert said.startswith('c.yaml:3: plugins.allow = "cfgkit": expected a list')


def test_a_clash_is_reported_with_the_rest(refused, write, site):
    body = "@hookimpl\ndef register_schedulers(register): register('plain', 'x:X')"
    site.install("pageloom-clash", {"clash": source(body)}, clash="clash")
    said = refused("runtime: {seed: -1}")
    assert len(said) == 2
    assert "'plain' is registered by both pageloom-cfgkit" in said[1]
    assert said[1].endswith("expected it to be excluded with plugins.deny: [clash]")
    config = load_config(write("c.yaml", HEAD + "plugins: {deny: [clash]}"))
    assert config.scheduler.policy == "plain"


def test_what_an_allow_list_leaves_is_checked_though_a_name_in_it_is_unknown(refused):
    said = refused("plugins: {allow: [cfgkit, yy]}", ["scheduler.options.x=1"])
    assert said[0].startswith("c.yaml:3: plugins.allow: 'yy' is not installed")
    assert said[1:] == [
        "--set scheduler.options.x=1: scheduler.options.x = 1: unknown key; "
        "expected nothing, for there are no options"
    ]
    (said,) = refused("plugins: {allow: [pageloomm]}")
    assert "did you mean 'pageloom'?" in said  # which might register `plain`


def test_where_no_scheduler_is_loaded_the_excluding_list_is_told(refused):
    (said,) = refused("plugins: {allow: []}")
    assert 'scheduler.policy = "plain": no scheduler is loaded; excluded by plugins.all' in said
    assert "cfgkit (pageloom-cfgkit)" in said
    assert "expected" not in said


def test_all_unknown_names_are_reported_each_at_its_list(refused, monkeypatch):
    monkeypatch.setenv("PAGELOOM_PLUGINS", "nope")
    said = refused("plugins:\n  allow: [yy]\n  deny: [zz]")
    starts = [line.partition(" is not installed")[0] for line in said]
    assert starts == [
        "c.yaml:4: plugins.allow: 'yy'",
        "c.yaml:5: plugins.deny: 'zz'",
        "environment: PAGELOOM_PLUGINS: 'nope'",
    ]
