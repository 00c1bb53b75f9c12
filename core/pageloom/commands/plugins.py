"""``pageloom plugins``: what is installed, and whether it can run here."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from pageloom.contract import AttentionBackend
    from pageloom.plugins import ComponentEntry, Plugins

MAX_MODEL_LEN = 4096

_COLUMNS = ("name", "plugin", "package", "runs", "reason")


def plugins(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List every component and observer: name, plugin, and whether it can run on this machine.

    plugins.allow, plugins.deny and PAGELOOM_PLUGINS take the names of plugins or their packages.
    """
    from rich.console import Console

    from pageloom.plugins import Plugins

    loaded = Plugins.load()
    with Console(stderr=True).status("Checking what can run here ..."):
        reasons = [reason_against(entry, loaded) for entry in loaded.components]
    if as_json:
        print(_json(loaded, reasons))
    else:
        _print_tables(loaded, reasons)


def reason_against(entry: ComponentEntry, plugins: Plugins) -> str | None:
    """Why a component cannot run on this machine, or None if it can.

    Attention backends are asked about a common model: bfloat16, 32 heads of 128 over 8 KV heads,
    on a GPU if there is one.
    """
    from pageloom.errors import one_line
    from pageloom.plugins import PluginError, pass_on_signals

    try:
        component = plugins.get(entry.kind, entry.name)
    except PluginError as error:
        return error.reason
    if entry.kind != "attention_backend":
        return None
    try:
        return _check(component)
    except (Exception, SystemExit) as error:  # a plugin's bug must not hide the other components
        pass_on_signals(error)
        return f"its check raised {one_line(error)}"


def _check(backend: type[AttentionBackend]) -> str | None:
    import torch

    from pageloom.contract import AttentionSpec, LayerSpec

    spec = AttentionSpec(
        device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
        dtype=torch.bfloat16,
        layers=(LayerSpec(num_heads=32, num_kv_heads=8, head_size=128, scale=128**-0.5),),
        block_size=backend.block_size(None, MAX_MODEL_LEN),
        max_model_len=MAX_MODEL_LEN,
    )
    return backend.check(spec)


def _json(plugins: Plugins, reasons: list[str | None]) -> str:
    components = [
        {**asdict(entry), "available": reason is None, "reason": reason}
        for entry, reason in zip(plugins.components, reasons, strict=True)
    ]
    failures = [
        {**asdict(failure.plugin), "reason": failure.reason, "traceback": failure.traceback}
        for failure in plugins.failures
    ]
    observers = [asdict(info) for info in plugins.observers]
    found = {"components": components, "observers": observers, "failures": failures}
    return json.dumps(found, indent=2)


def _print_tables(plugins: Plugins, reasons: list[str | None]) -> None:
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    whole = ("name", "plugin")  # not folded, so that they can be copied
    table = Table(*(Column(name, overflow="fold", no_wrap=name in whole) for name in _COLUMNS))
    yes, no = Text("yes", "green"), Text("no", "red")
    kind = None
    for entry, reason in zip(plugins.components, reasons, strict=True):
        if entry.kind != kind:
            kind = entry.kind
            _add_heading(table, kind)
        package, runs = f"{entry.package} {entry.version}", no if reason else yes
        table.add_row(f"  {entry.name}", entry.plugin, package, runs, Text(reason or ""))
    if plugins.observers:
        _add_heading(table, "observer")
    for info in plugins.observers:
        table.add_row(f"  {info.name}", info.name, f"{info.package} {info.version}", yes)
    Console().print(table)
    if plugins.failures:
        failed = Table(title="Not loaded", title_justify="left")
        for name in ("plugin", "package", "reason"):
            failed.add_column(name, overflow="fold")
        for failure in plugins.failures:
            info = failure.plugin
            failed.add_row(info.name, f"{info.package} {info.version}", Text(failure.reason))
        Console().print(failed)


def _add_heading(table: Table, kind: str) -> None:
    from rich.text import Text

    table.add_section()
    table.add_row(Text(kind, "bold"))
