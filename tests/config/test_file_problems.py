"""Files that are no configuration, and chains of files that do not work out."""

import pytest

from pageloom.config import ConfigError, load_config

HEAD = "model: {path: m}\nscheduler: {policy: plain}\n"  # two lines


@pytest.mark.parametrize(
    ("content", "reported"),
    [
        ("", "c.yaml: the file is empty; expected sections such as 'model:'"),
        ("# nothing\n", "c.yaml: the file is empty; expected sections such as 'model:'"),
        ("- a\n- b", "c.yaml: the file is not a mapping; expected sections such as 'model:'"),
        ("just text", "c.yaml: the file is not a mapping; expected sections such as 'model:'"),
        (b"model:\n  path: \xff", "c.yaml: c.yaml is not UTF-8 text (line 2)"),
    ],
)
def test_a_file_that_is_no_configuration_is_one_report(problems, content, reported):
    (said,) = problems(content)
    assert said.startswith(reported)


def test_a_file_that_is_not_there_is_reported_with_the_nearest(write, plugins):
    path = write("smollm2.yaml", HEAD)
    with pytest.raises(ConfigError, match=r"no file smolm2\.yaml; did you mean smollm2\.yaml\?"):
        load_config(path.with_name("smolm2.yaml"), (), plugins)
    with pytest.raises(ConfigError, match="is a directory"):
        load_config(path.parent, (), plugins)


def test_a_cycle_is_reported_with_its_whole_chain(problems, write):
    write("b.yaml", "extends: d.yaml")
    write("d.yaml", "runtime: {seed: 1}\nextends: b.yaml")
    (said,) = problems(f"{HEAD}extends: b.yaml")
    assert said == (
        "d.yaml:2: extends: files extend each other in a cycle: b.yaml -> d.yaml -> b.yaml"
    )


def test_a_long_chain_is_reported(problems, write):
    for i in range(1200):
        write(f"f{i}.yaml", f"extends: f{i + 1}.yaml")
    (said,) = problems(f"{HEAD}extends: f0.yaml")
    assert said == "f99.yaml:1: extends: files extend each other in a chain of more than 100"
