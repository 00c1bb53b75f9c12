import pytest

from pageloom.config import load_config, render
from pageloom.plugins import Plugins

MINIMAL = """
model: {path: m}
scheduler: {policy: plain}
"""


@pytest.fixture
def load(write, plugins):
    def load(text, *overrides):
        return load_config(write("c.yaml", text), overrides, plugins)

    return load


def test_what_is_not_given_has_its_default(load):
    config = load(MINIMAL)
    assert (config.model.path, config.scheduler.policy) == ("m", "plain")
    assert config.scheduler.max_num_seqs == 256
    assert config.plugins.deny == []


def test_files_extend_each_other_and_overrides_win(write, plugins):
    write("low.yaml", "scheduler: {max_num_seqs: 1, max_num_batched_tokens: 11}")
    write("high.yaml", "scheduler: {max_num_seqs: 2, policy: plain}\nruntime: {seed: 2}")
    path = write("c.yaml", "extends: [low.yaml, high.yaml]\nmodel: {path: m}\nruntime: {seed: 3}")
    config = load_config(path, ["scheduler.policy=tuned"], plugins)
    assert config.scheduler.max_num_batched_tokens == 11
    assert config.scheduler.max_num_seqs == 2
    assert config.scheduler.policy == "tuned"
    assert config.runtime.seed == 3


def test_a_base_lies_relative_to_the_file_that_extends_it(write, plugins, tmp_path):
    write("base.yaml", MINIMAL)
    (tmp_path / "elsewhere").mkdir()
    path = tmp_path / "elsewhere" / "c.yaml"
    path.write_text("extends: ../configs/base.yaml")
    assert load_config(path, (), plugins).model.path == "m"


def test_a_base_of_two_files_counts_once_below_both(write, plugins):
    write("base.yaml", f"{MINIMAL}\nruntime: {{seed: 1}}")
    write("left.yaml", "extends: base.yaml\nruntime: {seed: 2}")
    write("right.yaml", "extends: base.yaml")
    path = write("c.yaml", "extends: [left.yaml, right.yaml]")
    assert load_config(path, (), plugins).runtime.seed == 2


def test_options_merge_key_by_key_and_lists_replace_each_other(write, plugins):
    write(
        "base.yaml",
        """
        model: {path: m}
        scheduler:
          policy: tuned
          options: {window: 1, tenants: [a, b], weights: {a: 1, b: 2}}
        """,
    )
    path = write(
        "c.yaml",
        "extends: base.yaml\nscheduler: {options: {tenants: [c], weights: {b: 3}, share: 1}}",
    )
    assert load_config(path, (), plugins).scheduler.options == {
        "window": 1,
        "tenants": ["c"],
        "weights": {"a": 1, "b": 3},
        "share": 1,
    }


@pytest.mark.parametrize(
    ("overrides", "options"),
    [
        (["scheduler.policy=plain"], {}),
        (["scheduler.policy=tuned"], {"window": 1}),
        (["scheduler={policy: frozen, options: {depth: 2}}"], {"depth": 2}),
        (["scheduler.options.depth=2", "scheduler.policy=frozen"], {"depth": 2}),
        (["scheduler.options.share=1"], {"window": 1, "share": 1}),
    ],
)
def test_naming_another_component_drops_the_options_of_the_former(load, overrides, options):
    text = "model: {path: m}\nscheduler: {policy: tuned, options: {window: 1}}"
    assert load(text, *overrides).scheduler.options == options


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("scheduler.max_num_seqs=8", 8),
        ('scheduler.max_num_seqs="8"', 8),
        ("scheduler={max_num_seqs: 8}", 8),
        ("scheduler.max_num_seqs=${runtime.seed}", 5),
        ("scheduler.max_num_seqs=${env:SEATS}", 7),
        ("scheduler.max_num_seqs=${env:NO_SEATS,6}", 6),
    ],
)
def test_an_override_is_yaml(load, monkeypatch, override, value):
    monkeypatch.setenv("SEATS", "7")
    monkeypatch.delenv("NO_SEATS", raising=False)
    assert load(MINIMAL, "runtime.seed=5", override).scheduler.max_num_seqs == value


def test_the_last_override_of_a_key_wins_and_an_empty_one_is_null(load):
    config = load(MINIMAL, "runtime.seed=1", "runtime.seed=2", "kv_cache.memory=")
    assert config.runtime.seed == 2
    assert config.kv_cache.memory is None


def test_text_from_the_environment_is_not_interpolated_again(load, monkeypatch):
    monkeypatch.setenv("ODD", "a${env:OTHER}")
    config = load(MINIMAL, "model.path=${env:ODD}", "scheduler.policy=tuned")
    assert config.model.path == "a${env:OTHER}"
    note = load(MINIMAL, "scheduler.policy=tuned", "scheduler.options.note=${env:ODD}")
    assert note.scheduler.options == {"note": "a${env:OTHER}"}


def test_a_file_inside_an_installed_package_is_found_without_importing_it(load, site):
    (site.folder / "weights").mkdir()
    (site.folder / "weights" / "__init__.py").write_text("raise RuntimeError('imported')")
    (site.folder / "weights" / "m-1.Q4_1.gguf").write_text("")
    config = load(MINIMAL, "model.path=${pkg:weights/m-1.Q4_1.gguf}")
    assert config.model.path == str(site.folder / "weights" / "m-1.Q4_1.gguf")


def test_memory_may_be_text_or_bytes(load):
    assert load(MINIMAL, "kv_cache.memory=2GiB").kv_cache.memory_bytes == 2 * 2**30
    assert load(MINIMAL, "kv_cache.memory=4096").kv_cache.memory_bytes == 4096
    assert load(MINIMAL).kv_cache.memory_bytes is None


def test_yaml_anchors_and_merge_keys_work(load):
    config = load(
        """
        model: {path: m}
        scheduler:
          policy: tuned
          options:
            aging: &aging {half_life: 2.0}
            weights: {<<: *aging, other: 1}
        """
    )
    assert config.scheduler.options["weights"] == {"half_life": 2.0, "other": 1}


def test_without_plugins_given_the_configs_own_lists_say_what_is_loaded(write, plugins):
    path = write("c.yaml", f"{MINIMAL}\nplugins: {{allow: [pageloom-cfgkit]}}")
    assert load_config(path).scheduler.policy == "plain"


def test_the_origin_of_every_given_key_is_kept(write, plugins):
    write("base.yaml", "scheduler:\n  policy: tuned\n  options: {window: 1}\nmodel: {path: m}")
    path = write("c.yaml", "extends: base.yaml\nmodel:\n  path: n\n")
    origins = load_config(path, ["runtime.seed=1"], plugins).origins
    assert origins["model.path"] == "c.yaml:3"
    assert origins["scheduler.policy"] == "base.yaml:2"
    assert origins["scheduler.options.window"] == "base.yaml:3"
    assert origins["runtime.seed"] == "--set runtime.seed=1"
    assert "runtime.debug" not in origins


def test_a_rendered_configuration_says_where_values_came_from_and_loads_as_the_same(write, plugins):
    path = write(
        "c.yaml",
        r"""
        model: {path: "a\nb: ${oc.decode:'c'} \\${d}", tokenizer: "no"}
        scheduler:
          policy: tuned
          options:
            weights: {"x.y": 1, "on": 2}
            tenants: ["1", "a, b", "#"]
            note: "a\\${b}"
        kv_cache: {memory: 1GiB}
        """,
    )
    config = load_config(path, ["runtime.seed=9"], plugins)
    text = render(config)
    assert "  seed: 9" in text
    assert "# --set runtime.seed=9" in text
    assert "# c.yaml:7" in text
    assert "# default" in text
    assert load_config(write("again.yaml", text), (), plugins) == config


@pytest.mark.parametrize("name", ["base", "smollm2"])
def test_the_configurations_that_come_with_pageloom_are_right(name, request):
    path = request.config.rootpath / "configs" / f"{name}.yaml"
    overrides = ["model.path=m"] if name == "base" else []
    config = load_config(path, overrides, Plugins.load(["pageloom"]))
    assert config.scheduler.policy == "fcfs"
    if name == "smollm2":
        assert config.model.path.endswith("SmolLM2-135M-Instruct.Q4_1.gguf")


def test_api_keys_are_not_shown(load):
    config = load(MINIMAL + "\nserver: {api_keys: [sk-1, sk-2]}")
    assert config.server.api_keys == ["sk-1", "sk-2"]
    assert "sk-" not in render(config)
    assert config.shown()["server"]["api_keys"] == ["(hidden)", "(hidden)"]
