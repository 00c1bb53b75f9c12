"""Small real distributions, as pip would have installed them: modules plus a ``.dist-info``."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

import pytest


class Site:
    """A folder on ``sys.path`` that distributions are installed into."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(
        self, package: str, modules: Mapping[str, str], version: str = "1.0", **points: str
    ) -> None:
        """Install ``modules`` (name -> source) and entry points (name -> module)."""
        for name, source in modules.items():
            (self.folder / f"{name}.py").write_text(textwrap.dedent(source))
        info = self.folder / f"{package.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
        )
        lines = [f"{name} = {module}" for name, module in points.items()]
        (info / "entry_points.txt").write_text("\n".join(["[pageloom]", *lines]))


def source(body: str = "", version: str = "1.0") -> str:
    """A plugin's module, for this contract version."""
    return f"from pageloom.contract import hookimpl\ncontract_version = {version!r}\n{body}"


@pytest.fixture
def site(tmp_path, monkeypatch):
    """An empty `Site`; what was imported from it is forgotten afterwards."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.delenv("PAGELOOM_PLUGINS", raising=False)
    monkeypatch.delenv("PAGELOOM_TRACE", raising=False)
    monkeypatch.syspath_prepend(folder)
    before = set(sys.modules)
    yield Site(folder)
    for name in set(sys.modules) - before:
        if str(folder) in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]
