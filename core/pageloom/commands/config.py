"""``pageloom config``: what a configuration comes to."""

from __future__ import annotations

from pageloom.commands.options import ConfigArgument, SetOption


def config(path: ConfigArgument, overrides: SetOption) -> None:
    """Print the resolved configuration as YAML, and where each value came from."""
    from pageloom.config import load_config, render

    print(render(load_config(path, overrides)), end="")
