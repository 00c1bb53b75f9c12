"""What every test gets: no hub, few threads, and a check that no KV block was lost."""

from __future__ import annotations

import os
import weakref

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 0)):
    # More threads than cores wait for each other at every step of a parallel loop.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))

import pytest
from hypothesis import HealthCheck, settings

from pageloom.scheduling import Planner

settings.register_profile(
    "pageloom",
    deadline=None,  # these machines are shared: a slow example is no fault
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=bool(os.environ.get("CI")),
)
settings.load_profile("pageloom")
if os.environ.get("CI"):
    # Hypothesis also draws numbers and texts that stand in the modules imported so far, which are
    # others in every worker, and after every change of the code.
    from hypothesis.internal.conjecture import providers

    providers.is_local_module_file = lambda path: False


@pytest.fixture(autouse=True)
def _no_block_is_lost(monkeypatch):
    """After every test, each planner that it made or used accounts for all of its blocks."""
    planners = weakref.WeakSet()
    plan = Planner.plan

    def watched(self):
        planners.add(self)
        return plan(self)

    monkeypatch.setattr(Planner, "plan", watched)
    yield
    for planner in list(planners):
        planner.check_integrity()
