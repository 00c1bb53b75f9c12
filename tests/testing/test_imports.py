"""What `pageloom.testing` needs."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("missing", ["pytest", "hypothesis"])
def test_without_its_extra_it_says_what_to_install(missing):
    source = f"import sys; sys.modules[{missing!r}] = None; import pageloom.testing"
    run = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert run.returncode == 1
    last = run.stderr.strip().splitlines()[-1]
    assert last == f"ImportError: pageloom.testing needs {missing}: pip install 'pageloom[testing]'"
