import textwrap

import pytest

import distributions
from pageloom.config import ConfigError, load_config
from pageloom.plugins import Plugins

site = distributions.site

COMPONENTS = """
from dataclasses import dataclass, field
from enum import Enum
from pageloom.contract import Scheduler, WeightLoader, hookimpl

contract_version = "1.0"

@hookimpl
def register_schedulers(register):
    register("plain", "cfgkit:Plain")
    register("tuned", "cfgkit:Tuned")
    register("broken", "cfgkit_missing:Broken")
    register("frozen", "cfgkit:Frozen")
    register("demanding", "cfgkit:Demanding")
    register("illtyped", "cfgkit:IllTyped")

class Plain(Scheduler):
    def schedule(self, view, plan): ...

class Order(Enum):
    ARRIVAL = "arrival"
    DEADLINE = "deadline"

@dataclass
class Aging:
    half_life: float = 1.0
    enabled: bool = True

class Tuned(Plain):
    @dataclass
    class Config:
        window: int = 8
        share: float = 0.5
        order: Order = Order.ARRIVAL
        tenants: list[str] = field(default_factory=list)
        weights: dict[str, float] = field(default_factory=dict)
        aging: Aging = field(default_factory=Aging)
        note: str | None = None

        def __post_init__(self):
            if self.window == -1:
                1 / 0
            if self.window == -2:
                raise SystemExit(3)
            if self.window > 100:
                raise ValueError("window must be at most 100, a step has no more")

class Frozen(Plain):
    @dataclass(frozen=True)
    class Config:
        depth: int = 1

class Demanding(Plain):
    @dataclass
    class Config:
        url: str

class IllTyped(Plain):
    @dataclass
    class Config:
        when: complex = 0j
"""


@pytest.fixture
def plugins(site):
    """Schedulers ``plain`` (no options), ``tuned`` and more that are wrong in some way."""
    site.install("pageloom-cfgkit", {"cfgkit": COMPONENTS}, cfgkit="cfgkit")
    return Plugins.load(["cfgkit"])


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write a file next to the others; the working directory is their folder."""
    folder = tmp_path / "configs"
    folder.mkdir()
    monkeypatch.chdir(folder)

    def write(name, text):
        data = text if isinstance(text, bytes) else textwrap.dedent(text).encode()
        (folder / name).write_bytes(data)
        return folder / name

    return write


@pytest.fixture
def problems(write, plugins):
    """The problems, as lines, of the configuration ``c.yaml`` with this text."""

    def problems(text, overrides=()):
        with pytest.raises(ConfigError) as caught:
            load_config(write("c.yaml", text), overrides, plugins)
        assert all(problem.key or problem.where for problem in caught.value.problems)
        return [str(problem) for problem in caught.value.problems]

    return problems
