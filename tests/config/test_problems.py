"""Every kind of wrong key, value and override, each reported with its place and what would work."""

import pytest

from pageloom.config import ConfigError, load_config

INTERPOLATIONS = "${env:NAME}, ${env:NAME,DEFAULT}, ${pkg:MODULE/FILE} or ${section.key}"
HEAD = "model: {path: m}\nscheduler: {policy: plain}\n"  # two lines


@pytest.mark.parametrize(
    ("line", "reported"),
    [
        ("schedulr: {policy: plain}", 'c.yaml:3: schedulr = {"policy": "plain"}: unknown key; '
         "expected one of model, scheduler, attention, kv_cache, plugins, runtime, parallel, "
         "server; did you mean scheduler?"),
        ("runtime: {sed: 1}", "c.yaml:3: runtime.sed = 1: unknown key; expected one of device, "
         "num_threads, enforce_eager, seed, debug; did you mean seed?"),
        ("kv_cache: {num_blocks: abc}", 'c.yaml:3: kv_cache.num_blocks = "abc": expected an '
         "integer of at least 1, or null"),
        ("kv_cache: {num_blocks: 2.5}", "c.yaml:3: kv_cache.num_blocks = 2.5: expected an integer "
         "of at least 1, or null"),
        ("kv_cache: {num_blocks: true}", "c.yaml:3: kv_cache.num_blocks = true: expected an "
         "integer of at least 1, or null"),
        ("kv_cache: {num_blocks: 0}", "c.yaml:3: kv_cache.num_blocks = 0: expected an integer of "
         "at least 1, or null"),
        ("kv_cache: {num_blocks: [1]}", "c.yaml:3: kv_cache.num_blocks = [1]: expected an "
         "integer of at least 1, or null"),
        ("kv_cache: {gpu_memory_utilization: 90}", "c.yaml:3: kv_cache.gpu_memory_utilization = "
         "90.0: expected a number above 0 and at most 1"),
        ("kv_cache: {gpu_memory_utilization: .nan}", "c.yaml:3: kv_cache.gpu_memory_utilization = "
         "NaN: expected a number above 0 and at most 1"),
        ("kv_cache: {gpu_memory_utilization: null}", "c.yaml:3: kv_cache.gpu_memory_utilization = "
         "null: expected a number above 0 and at most 1"),
        ("kv_cache: {memory: 4G}", 'c.yaml:3: kv_cache.memory = "4G": expected a size such as '
         '"4GiB" or "512MiB", or a number of bytes above 0, or null'),
        ("kv_cache: {memory: true}", "c.yaml:3: kv_cache.memory = true: expected a size such as "
         '"4GiB" or "512MiB", or a number of bytes above 0, or null'),
        ("kv_cache: {memory: 0}", 'c.yaml:3: kv_cache.memory = 0: expected a size such as '
         '"4GiB" or "512MiB", or a number of bytes above 0, or null'),
        ("kv_cache: {swap_space: -1}", 'c.yaml:3: kv_cache.swap_space = -1: expected a size such '
         'as "4GiB" or "512MiB", or a number of bytes (0 for none), or null'),
        ("server: {max_body: 0}", 'c.yaml:3: server.max_body = 0: expected a size such as '
         '"4GiB" or "512MiB", or a number of bytes above 0'),
        ("runtime: {num_threads: 100000}", "c.yaml:3: runtime.num_threads = 100000: expected an "
         "integer from 1 to 1024, or null"),
        ("runtime: {debug: 1}", "c.yaml:3: runtime.debug = 1: expected true or false"),
        ("runtime: {debug: maybe}", 'c.yaml:3: runtime.debug = "maybe": expected true or false'),
        ("runtime: {device: gpu}", 'c.yaml:3: runtime.device = "gpu": expected auto, cpu, cuda or '
         "cuda:N"),
        ("runtime: {seed: -1}", "c.yaml:3: runtime.seed = -1: expected an integer of at least 0"),
        ("plugins: {deny: {a: 1}}", 'c.yaml:3: plugins.deny = {"a": 1}: expected '
         "a list, each item text"),
        ("plugins: {deny: [true]}", "c.yaml:3: plugins.deny = [true]: expected a list, each item "
         "text"),
        ("kv_cache: {options: [1]}", "c.yaml:3: kv_cache.options = [1]: expected a "
         "mapping"),
        ("runtime: 5", "c.yaml:3: runtime = 5: expected a mapping with some of device, "
         "num_threads, enforce_eager, seed, debug"),
        ("runtime:", "c.yaml:3: runtime = null: expected a mapping with some of device, "
         "num_threads, enforce_eager, seed, debug"),
        ("runtime: [seed]", 'c.yaml:3: runtime = ["seed"]: expected a mapping with some of '
         "device, num_threads, enforce_eager, seed, debug"),
        ("runtime: {seed: '${env:UNSET_X}'}", 'c.yaml:3: runtime.seed = "${env:UNSET_X}": the '
         "environment variable UNSET_X is not set; set it, or write ${env:UNSET_X,DEFAULT}"),
        ("runtime: {seed: '${env:UNSET_X,y}'}", 'c.yaml:3: runtime.seed = "${env:UNSET_X,y}": '
         'it resolves to "y"; expected an integer of at least 0'),
        ("runtime: {seed: '${nowhere}'}", 'c.yaml:3: runtime.seed = "${nowhere}": Interpolation '
         "key 'nowhere' not found"),
        ("runtime: {seed: '${runtime.seed}'}", 'c.yaml:3: runtime.seed = "${runtime.seed}": '
         "Recursive interpolation detected"),
        ("runtime: {seed: '${env'}", 'c.yaml:3: runtime.seed = "${env": not a valid interpolation, '
         f"which would be {INTERPOLATIONS}; expected an integer of at least 0"),
        ("runtime: {seed: '${env:'}", 'c.yaml:3: runtime.seed = "${env:": not a valid '
         f"interpolation, which would be {INTERPOLATIONS}; expected an integer of at least 0"),
        ("runtime: {device: '${env:}'}", 'c.yaml:3: runtime.device = "${env:}": not of the form '
         "${env:NAME} or ${env:NAME,DEFAULT}"),
        ("runtime: {device: '${env:UNSET_X,}'}", 'c.yaml:3: runtime.device = "": expected auto, '
         "cpu, cuda or cuda:N"),
        ("runtime: {device: '${pkg:}'}", "c.yaml:3: runtime.device = \"${pkg:}\": '' is not of the "
         "form MODULE/FILE"),
        ("runtime: {device: '${pkg:a,b}'}", "c.yaml:3: runtime.device = \"${pkg:a,b}\": 'a,b' is "
         "not of the form MODULE/FILE"),
        ("runtime: {device: '${nope:1}'}", 'c.yaml:3: runtime.device = "${nope:1}": Unsupported '
         f"interpolation type nope; expected {INTERPOLATIONS}"),
        ("runtime: {device: ${env:HOME}}", "c.yaml:3: not valid YAML: while parsing a flow "
         "mapping, expected ',' or '}', but got '{'; expected each \"${...}\" in quotes"),
        ("plugins: {allow: [[core]]}", 'c.yaml:3: plugins.allow = [["core"]]: expected a list, '
         "each item text or null"),
        ("plugins: {allow: [{a: 1}]}", 'c.yaml:3: plugins.allow = [{"a": 1}]: expected a list, '
         "each item text or null"),
        ("plugins: {deny: [[a]]}", 'c.yaml:3: plugins.deny = [["a"]]: expected a list, each item '
         "text"),
        ("runtime: {seed: 0x" + "9" * 5000 + "}", "c.yaml:3: runtime.seed: '0x" + "9" * 75 + "...' "
         "is no integer of 64 bits"),
        ("runtime: {seed: " + "9" * 5000 + "}", "c.yaml:3: runtime.seed: '" + "9" * 77 + "...' is "
         "no YAML int"),
        ("kv_cache: {memory: '" + "9" * 500 + "B'}", 'c.yaml:3: kv_cache.memory = "' + "9" * 76
         + '...: expected a size such as "4GiB" or "512MiB", or a number of bytes above 0, or '
         "null"),
        ("kv_cache: " + "{a: " * 500 + "}" * 500, "c.yaml:3: nested more than 32 deep"),
        ("kv_cache: " + "[" * 3000 + "]" * 3000, "c.yaml:3: nested more than 32 deep"),
        ("kv_cache: {options: {a: " + "[" * 40 + "]" * 40 + "}}",
         "c.yaml:3: kv_cache.options.a" + "[0]" * 30 + ": nested more than 32 deep"),
        ("extends: 'a\\0b'".replace("'", '"'), "c.yaml:3: extends: not a path: embedded null byte"),
        ("runtime.seed: 1", "c.yaml:3: runtime.seed = 1: a dot does not nest in a file; expected "
         "'runtime:' with 'seed:' indented below it"),
        ("max_num_seqs: 4", "c.yaml:3: max_num_seqs = 4: unknown key; expected one of model, "
         "scheduler, attention, kv_cache, plugins, runtime, parallel, server; did you mean "
         "scheduler.max_num_seqs?"),
        ("runtime: {seed: 1, seed: 2}", "c.yaml:3: runtime.seed: given twice; it also stands in "
         "line 3"),
        ("runtime: {1: 2}", "c.yaml:3: runtime: a key that is not text; put it in quotes"),
        ("runtime: {seed: !!python/name:os.system x}", "c.yaml:3: runtime.seed: the YAML tag "
         "tag:yaml.org,2002:python/name:os.system is not allowed"),
        ("runtime: !thing {seed: 1}", "c.yaml:3: runtime: the YAML tag !thing is not allowed"),
        ("runtime: &a {seed: *a}", "c.yaml:3: runtime.seed: an alias that contains itself"),
        ("runtime: {seed: !!int x}", "c.yaml:3: runtime.seed: 'x' is no YAML int"),
        ("runtime: [1", "c.yaml:3: not valid YAML: while parsing a flow sequence, expected ',' or "
         "']', but got '<stream end>'"),
        ("runtime:\n\tseed: 1", "c.yaml:4: not valid YAML: while scanning for the next token, "
         "found character '\\t' that cannot start any token"),
        ("runtime: \x07", "c.yaml:3: not valid YAML: the character '\\x07' is not allowed"),
        ("---\nmodel: {}", "c.yaml:3: not valid YAML: expected a single document in the stream, "
         "but found another document"),
        ("extends: 5", "c.yaml:3: extends = 5: expected a path, or a list of paths"),
        ("extends: bsae.yaml", "c.yaml:3: extends: there is no file bsae.yaml; did you mean "
         "base.yaml?"),
        ("extends: .", "c.yaml:3: extends: . is a directory, not a YAML file"),
        ("extends: c.yaml", "c.yaml:3: extends: files extend each other in a cycle: c.yaml -> "
         "c.yaml"),
        ("kv_cache: {memory: 1GiB, num_blocks: 5}", "c.yaml:3: kv_cache.num_blocks = 5: "
         "kv_cache.memory gives the size of the cache already; expected one of the two "
         "(kv_cache.memory stands in c.yaml:3)"),
    ],
)  # fmt: skip
def test_one_wrong_line_is_one_exact_report(problems, write, monkeypatch, line, reported):
    monkeypatch.delenv("UNSET_X", raising=False)
    write("base.yaml", HEAD)
    (said,) = problems(HEAD + line)
    assert said == reported


@pytest.mark.parametrize(
    ("override", "reported"),
    [
        ("foo", "--set foo: expected KEY=VALUE, such as scheduler.max_num_seqs=64"),
        ("=1", "--set =1: expected KEY=VALUE, such as scheduler.max_num_seqs=64"),
        ("a..b=1", "--set a..b=1: expected KEY=VALUE, such as scheduler.max_num_seqs=64"),
        ("runtime.seed=[1", "--set runtime.seed=[1: runtime.seed: not valid YAML: while parsing a "
         "flow sequence, expected ',' or ']', but got '<stream end>'"),
        ("runtime.sed=1", "--set runtime.sed=1: runtime.sed = 1: unknown key; expected one of "
         "device, num_threads, enforce_eager, seed, debug; did you mean seed?"),
        ("runtime=1", "--set runtime=1: runtime = 1: expected a mapping with some of device, "
         "num_threads, enforce_eager, seed, debug"),
        ("runtime.seed.x=1", '--set runtime.seed.x=1: runtime.seed = {"x": 1}: expected an'
         " integer of at least 0"),
        ("runtime.seed=abc", '--set runtime.seed=abc: runtime.seed = "abc": expected an integer '
         "of at least 0"),
        ("model.dtype=fp16", '--set model.dtype=fp16: model.dtype = "fp16": expected one of auto, '
         "float32, bfloat16, float16"),
        ("model.path=", "--set model.path=: model.path = null: expected text that is not empty"),
        ("model.tokenizer=yes", "--set model.tokenizer=yes: model.tokenizer = true: expected text "
         "or null"),
        ("scheduler.policy=plian", '--set scheduler.policy=plian: scheduler.policy = "plian": no '
         "plugin registers this name; expected one of broken, demanding, frozen, illtyped, plain, "
         "tuned; did you mean plain?"),
        ("scheduler.policy=cfgkit:Plain", "--set scheduler.policy=cfgkit:Plain: scheduler.policy "
         '= "cfgkit:Plain": no plugin registers this name; expected one of broken, demanding, '
         "frozen, illtyped, plain, tuned"),
        ("kv_cache.quantizer=fp8", '--set kv_cache.quantizer=fp8: kv_cache.quantizer = "fp8": no '
         "KV quantizer is loaded; expected null"),
        ("extends=a.yaml", "--set extends=a.yaml: extends: it belongs in a file"),
        ("foo.bar=1", "--set foo.bar=1: foo.bar = 1: unknown key; expected one of model, "
         "scheduler, attention, kv_cache, plugins, runtime, parallel, server"),
        ("MAX_num_seqs=4", "--set MAX_num_seqs=4: MAX_num_seqs = 4: unknown key; expected one of "
         "model, scheduler, attention, kv_cache, plugins, runtime, parallel, server; did you mean "
         "scheduler.max_num_seqs?"),
        ("runtime.SEED=1", "--set runtime.SEED=1: runtime.SEED = 1: unknown key; expected one of "
         "device, num_threads, enforce_eager, seed, debug; did you mean seed?"),
        ("runtime.seed=\nx", '--set runtime.seed=\\nx: runtime.seed = "x": expected an integer of '
         "at least 0"),
        ("runtime.seed=" + "x" * 99, "--set runtime.seed=" + "x" * 64 + '...: runtime.seed = "'
         + "x" * 76 + "...: expected an integer of at least 0"),
        ("attention.options.x=1", '--set attention.options.x=1: attention.options = {"x": 1}: '
         "options of no component; expected attention.backend to name the component that they "
         "belong to"),
        ("scheduler.options.x=1", "--set scheduler.options.x=1: scheduler.options.x = 1: unknown "
         "key; expected nothing, for there are no options"),
        ("scheduler.options.window=1", "--set scheduler.options.window=1: scheduler.options.window "
         "= 1: an option of tuned, but scheduler.policy is plain; expected nothing, for there are "
         "no options"),
    ],
)  # fmt: skip
def test_one_wrong_override_is_one_exact_report(problems, plugins, override, reported):
    plugins.skipped.clear()  # what else is installed here is no part of the message
    (said,) = problems(HEAD, [override])
    assert said == reported


@pytest.mark.parametrize("room", ["null", "0", "0MiB"])
def test_swapping_needs_room(problems, room):
    (said,) = problems(
        HEAD + f"kv_cache: {{swap_space: {room}}}", ["scheduler.preemption_mode=swap"]
    )
    assert "kv_cache.swap_space = " in said
    assert said.endswith(
        'scheduler.preemption_mode swap needs room on the host; expected a size such as "1GiB"'
    )


@pytest.mark.parametrize(
    ("policy", "options", "reported"),
    [
        ("tuned", "{windw: 1}", "options.windw = 1: unknown key; expected one of window, share, "
         "order, tenants, weights, aging, note; did you mean window?"),
        ("tuned", "{depth: 1}", "options.depth = 1: an option of frozen, but scheduler.policy is "
         "tuned; expected one of window, share, order, tenants, weights, aging, note"),
        ("tuned", "{window: x}", 'options.window = "x": expected an integer'),
        ("tuned", "{order: dead}", 'options.order = "dead": expected one of ARRIVAL, DEADLINE'),
        ("tuned", "{aging: 3}", "options.aging = 3: expected a mapping with some of half_life, "
         "enabled"),
        ("tuned", "{aging: {half: 3}}", "options.aging.half = 3: unknown key; expected one of "
         "half_life, enabled; did you mean half_life?"),
        ("tuned", "{aging: {enabled: 3}}", "options.aging.enabled = 3: expected true or false"),
        ("tuned", "{weights: {a: b}}", 'options.weights = {"a": "b"}: Value \'b\' of type \'str\' '
         "could not be converted to Float; expected a mapping"),
        ("tuned", "{window: 101}", "options: window must be at most 100, a step has no more"),
        ("tuned", "{share: .nan}", "options.share = NaN: expected a number"),
        ("tuned", "{weights: {a: .nan}}", 'options.weights = {"a": NaN}: expected a mapping'),
        ("tuned", "{window: -1}", "options: Tuned.Config failed: ZeroDivisionError: division "
         "by zero"),
        ("tuned", "{window: -2}", "options: Tuned.Config failed: SystemExit: 3"),
        ("demanding", "{}", "options.url: required, but not given; expected text"),
        ("frozen", "{depth: x}", 'options.depth = "x": expected an integer'),
    ],
)  # fmt: skip
def test_a_wrong_option_of_a_component_is_one_exact_report(problems, policy, options, reported):
    text = f"model: {{path: m}}\nscheduler:\n  policy: {policy}\n  options: {options}"
    (said,) = problems(text)
    assert said == f"c.yaml:4: scheduler.{reported}"


def test_a_component_that_cannot_be_imported_or_configured_is_reported(problems):
    (said,) = problems("model: {path: m}\nscheduler: {policy: broken}")
    assert said.startswith("c.yaml:2: scheduler.policy = \"broken\": scheduler 'broken' ")
    assert "No module named 'cfgkit_missing'" in said
    (said,) = problems("model: {path: m}\nscheduler: {policy: illtyped}")
    assert "IllTyped.Config cannot be filled from YAML" in said


def test_a_required_key_that_is_not_given_is_reported(problems):
    expected = "model.path: required, but not given; expected text that is not empty"
    (said,) = problems("scheduler: {policy: plain}")
    assert said.endswith(f"c.yaml: {expected}")
    (said,) = problems("scheduler: {policy: plain}\nmodel: {dtype: auto}")
    assert said == f"c.yaml:2: {expected}"


def test_a_whole_prompt_must_fit_a_step_without_chunked_prefill(problems):
    text = """
    model: {path: m, max_model_len: 4096}
    scheduler:
      policy: plain
      enable_chunked_prefill: false
    """
    (said,) = problems(text)
    assert said == (
        "c.yaml:3: scheduler.max_num_batched_tokens = 2048: without enable_chunked_prefill a whole "
        "prompt must fit in one step; expected at least model.max_model_len, which is 4096"
    )


def test_every_option_that_cannot_be_resolved_is_reported_and_no_other(problems, monkeypatch):
    monkeypatch.delenv("UNSET_X", raising=False)
    text = """
    model: {path: m}
    scheduler:
      policy: demanding
      options:
        a: '${env:UNSET_X}'
        b: [1, {c: '${nowhere}'}]
    """
    said = problems(text)
    assert [line.partition(" = ")[0] for line in said] == [
        "c.yaml:6: scheduler.options.a",
        "c.yaml:7: scheduler.options.b[1].c",
    ]


def test_options_that_contain_each_other_are_reported(problems):
    text = """
    model: {path: m}
    scheduler: {policy: plain, options: {a: {b: '${kv_cache.options}'}}}
    kv_cache: {options: {c: '${scheduler.options}'}}
    """
    said = problems(text)
    assert len(said) == 2
    assert all(line.endswith("Recursive interpolation detected") for line in said)
    assert max(map(len, said)) < 200


def test_an_empty_default_is_no_warning(problems, recwarn):
    problems("model: {path: '${env:UNSET_X,}'}")
    assert not recwarn.list


def test_everything_wrong_in_all_files_overrides_and_components_comes_at_once(problems, write):
    write("base.yaml", "runtime: {seed: abc}\nscheduler: {max_num_seqs: 0, policy: plain}")
    write("bad.yaml", "runtime: [")
    said = problems(
        """
        extends: [base.yaml, bad.yaml, gone.yaml]
        modell: {path: m}
        runtime: {seed: 1, device: '${env:UNSET_X}'}
        scheduler: {policy: nope}
        attention: {backend: auto, options: {a: 1}}
        """,
        ["foo", "kv_cache.num_block=1", "kv_cache.memory=lots"],
    )
    for start in (
        "bad.yaml:1: not valid YAML",
        "c.yaml:2: extends: there is no file gone.yaml",
        "--set foo: expected KEY=VALUE",
        'base.yaml:1: runtime.seed = "abc"',
        "c.yaml:3: modell = ",
        "c.yaml:4: runtime.device = ",
        "base.yaml:2: scheduler.max_num_seqs = 0",
        "--set kv_cache.num_block=1: kv_cache.num_block = 1: unknown key",
        "--set kv_cache.memory=lots: kv_cache.memory = ",
        'c.yaml:5: scheduler.policy = "nope"',
        "c.yaml:6: attention.options = ",
    ):
        assert [line for line in said if line.startswith(start)], (start, said)
    assert len(said) == 11  # and not that model.path is missing: a file could not be read


def test_the_message_of_several_problems_counts_and_lists_them(write, plugins):
    with pytest.raises(ConfigError) as caught:
        load_config(write("c.yaml", HEAD), ["a=1", "b=2"], plugins)
    first, *rest = str(caught.value).splitlines()
    assert first == "2 problems in the configuration:"
    assert rest == [f"  {problem}" for problem in caught.value.problems]
