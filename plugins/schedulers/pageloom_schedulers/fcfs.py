"""First come, first served."""

from __future__ import annotations

from pageloom_schedulers.policy import Policy


class FCFS(Policy):
    """Serves running requests in order of arrival, and then admits waiting ones in that order."""
