"""``benchmarks/triton_resources.py``, which is a script, as a module."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "triton_resources.py"


def load_script():
    spec = importlib.util.spec_from_file_location("triton_resources", SCRIPT)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
