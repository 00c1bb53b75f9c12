from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pageloom.config import ConfigError, build_options
from pageloom.contract import Component


class Mode(Enum):
    FAST = "fast"
    SAFE = "safe"


@dataclass(frozen=True)
class Inner:
    depth: int = 1


class Rich(Component):
    @dataclass(frozen=True)
    class Config:
        count: int = 1
        note: str | None = None
        mode: Mode = Mode.FAST
        names: list[str] = field(default_factory=list)
        inner: Inner = field(default_factory=Inner)
        maybe: Inner | None = None
        free: dict[str, Any] = field(default_factory=dict)


def test_options_become_an_instance_of_the_components_config():
    options = {"count": "3", "mode": "SAFE", "inner": {"depth": 4}, "maybe": {"depth": 5}}
    config = build_options(Rich, options)
    assert type(config) is Rich.Config
    assert config == Rich.Config(count=3, mode=Mode.SAFE, inner=Inner(4), maybe=Inner(5))


def test_no_options_are_the_defaults():
    assert build_options(Rich, {}) == Rich.Config()
    assert isinstance(build_options(Component, {}), Component.Config)


def test_enums_are_taken_by_name_or_value():
    assert build_options(Rich, {"mode": "safe"}).mode is Mode.SAFE


def test_all_wrong_options_are_reported_at_once():
    options = {"count": "x", "mod": 1, "inner": {"depth": True}, "names": "a"}
    with pytest.raises(ConfigError) as caught:
        build_options(Rich, options)
    assert [problem.key for problem in caught.value.problems] == [
        "count",
        "mod",
        "inner.depth",
        "names",
    ]


@given(st.text().filter(lambda text: text != "???"))
def test_resolved_text_is_taken_literally(text):
    options = {"note": text, "names": [text], "free": {"deep": [{"er": text}]}}
    assert build_options(Rich, options) == Rich.Config(
        note=text, names=[text], free={"deep": [{"er": text}]}
    )


@given(st.text(alphabet="\\${}a:", max_size=8))
def test_text_that_looks_like_an_interpolation_is_taken_literally(text):
    assert build_options(Rich, {"note": text}).note == text


def test_options_given_are_not_changed():
    options = {"free": {"a": [1]}, "names": ["n"]}
    build_options(Rich, options).free["a"].append(2)
    assert options == {"free": {"a": [1]}, "names": ["n"]}
