"""The plugin ``request_log``: a line in the log for each request that ended, at level info."""

from __future__ import annotations

import logging
from dataclasses import asdict

from pageloom.contract import RequestRecord, hookimpl

contract_version = "1.0"

# Under Pageloom's own logger, whose level an operator sets.
log = logging.getLogger("pageloom.requests")


@hookimpl
def request_finished(record: RequestRecord) -> None:
    if not log.isEnabledFor(logging.INFO):
        return
    times = {
        "queue_seconds": _since(record, record.first_scheduled),
        "ttft_seconds": _since(record, record.first_token),
        "e2e_seconds": _since(record, record.finished),
    }
    log.info(
        "request %s ended by %s: %d prompt tokens (%d cached), %d output tokens, %d preemptions, "
        "TTFT %s s, %s s in all",
        record.request_id,
        record.finish_reason,
        record.prompt_tokens,
        record.cached_tokens,
        record.output_tokens,
        record.preemptions,
        times["ttft_seconds"],
        times["e2e_seconds"],
        extra={"fields": {**_counts(record), **times}},
    )


def _counts(record: RequestRecord) -> dict[str, object]:
    clocks = ("arrived", "first_scheduled", "first_token", "finished")
    return {name: value for name, value in asdict(record).items() if name not in clocks}


def _since(record: RequestRecord, when: float | None) -> float | None:
    """Seconds from arrival, in milliseconds' precision."""
    return None if when is None else round(when - record.arrived, 3)
