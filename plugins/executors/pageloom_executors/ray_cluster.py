"""The Ray cluster that ranks run in: how it is joined, and where in it there is room."""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from pageloom.contract import WorkerError

log = logging.getLogger(__name__)

PATIENCE = 10.0  # seconds after which it is said what is waited for
PROBE = 10.0  # seconds for a cluster to take a connection
OBJECT_STORE = 1 << 28  # bytes of a cluster of our own: steps are small


def connect(address: str) -> bool:
    """Join the cluster, or start one for ``local``; False if this process is in one already.
    Raises `WorkerError`."""
    import ray

    if ray.is_initialized():
        return False
    key, wanted = _given(address)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # or it warns of a change
    options: dict[str, Any] = {"address": address}
    if wanted == "local":
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        options |= {"include_dashboard": False, "object_store_memory": OBJECT_STORE}
    try:
        _probe(wanted)
        with _signals_kept():
            ray.init(**options, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise WorkerError(
            f"no Ray cluster at {key} {wanted}: {first_line(error)}; start one by "
            "'ray start --head', or set parallel.options.address to local"
        ) from error
    return True


def _given(address: str) -> tuple[str, str]:
    """The address of the cluster as it was given, and by what."""
    if address == "auto" and (set_there := os.environ.get("RAY_ADDRESS")):
        return "RAY_ADDRESS", set_there
    return "parallel.options.address", address


def _probe(address: str) -> None:
    """Raise `ConnectionError` if nobody listens at an address, for which Ray would wait for many
    minutes, and `ValueError` if it is none."""
    from ray._private.services import canonicalize_bootstrap_address

    if "://" in address:
        raise ValueError("it must be auto, local or HOST:PORT")
    if (found := canonicalize_bootstrap_address(address)) is None:
        return  # a cluster of its own
    host, _, port = found.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), PROBE).close()
    except OSError as error:
        raise ConnectionError(f"{found} takes no connection ({error.strerror or error})") from error


def disconnect() -> None:
    """Leave the cluster, and end it if it was started here."""
    import ray

    with _signals_kept():
        ray.shutdown()


def wait_for_room(group: Any, bundles: Sequence[Mapping[str, float]], seconds: float) -> None:
    """Returns when the placement group ``group`` of these ``bundles`` is made. Raises
    `WorkerError` if it is not within ``seconds``."""
    import ray

    deadline = time.monotonic() + seconds
    while not group.wait(min(PATIENCE, seconds)):
        alive = [node for node in ray.nodes() if node["Alive"]]
        free = {n: v for n, v in ray.available_resources().items() if n in ("CPU", "GPU")}
        lack = (
            f"the Ray cluster has no room for {len(bundles)} ranks with {_amounts(bundles[0])} "
            f"each: {_amounts(free)} are free on {len(alive)} machines"
        )
        if time.monotonic() >= deadline:
            raise WorkerError(f"{lack}, after {seconds:g} seconds")
        log.warning("%s; room is waited for", lack)


def by_machine(group: Any, count: int) -> list[int]:
    """The ``count`` bundles of a placement group machine by machine, this one first."""
    import ray
    from ray.util import placement_group_table

    here = ray.get_runtime_context().get_node_id()
    nodes = placement_group_table(group)["bundles_to_node_id"]
    return sorted(range(count), key=lambda b: (nodes[b] != here, nodes[b], b))


def first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def why_dead(error: Exception) -> str:
    """What Ray's report says of why an actor has died, without its advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = next((line for line in lines if "cause" in line.lower()), lines[0] if lines else "")
    if "creation task" in said:  # such as of a package that is not there
        said = lines[-1]
    return said.partition(" Some common causes")[0]


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Ray takes SIGTERM for itself, which is the business of whoever owns the process. It leaves
    it alone in other threads than the main one, where Python would not let us set it."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is not before:
            signal.signal(signal.SIGTERM, before)


def _amounts(resources: Mapping[str, float]) -> str:
    return " and ".join(f"{amount:g} {name}" for name, amount in resources.items()) or "none"
